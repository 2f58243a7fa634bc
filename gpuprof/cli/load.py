"""``gpuprof load``: send traffic to a server and compare its answers with the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gpuprof
from gpuprof.cli.output import (
    Format,
    VerdictOptions,
    print_json,
    print_rows,
    print_text,
    say_note,
    show_progress,
    show_verdicts,
)
from gpuprof.domain.plural import count_of
from gpuprof.domain.table import make_columns
from gpuprof.errors import InputError
from gpuprof.pipeline.load import DEFAULT_URL

_PERCENTILES = " ".join(
    f"{name}_ms {name}_low_ms:95%_from {name}_high_ms:to predicted_{name}_ms {name}_ms_error"
    for name in ("p50", "p95", "p99")
)
_COLUMNS = f"model rate_rps:sent/s goodput_rps predicted_goodput_rps goodput_rps_error {_PERCENTILES} slo_ms"
#: Unanswered requests, mean times by stage, and the parts of the slowest 1% of the answers.
_DETAILS = (
    f"{_COLUMNS} refused predicted_refused failed lost:no_answer answered:requests "
    "router_ms:network_and_router_ms network_ms:of_it_network queue_ms gather_ms infer_ms:model_ms "
    "predicted_infer_ms infer_ms_error scatter_ms batches:batches_by_size slowest_ms:slowest_1%_ms "
    "slowest_late_ms:sent_late_ms slowest_network_ms:network_ms slowest_router_ms:router_ms slowest_queue_ms:queue_ms "
    "slowest_infer_ms:model_ms"
)


def load(
    traffic: gpuprof.LoadTraffic,
    access: gpuprof.ServerAccess,
    verdicts: VerdictOptions,
    target: Annotated[
        str | None,
        typer.Argument(
            help="Address of the server, or its map, which is then served at the default address; default: map.json.",
            show_default=False,
        ),
    ] = None,
    map_file: Annotated[
        Path | None,
        typer.Option(
            "--map",
            help="Deployment map with rates, SLOs and predictions; default: map.json, where no rates are given.",
        ),
    ] = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Send traffic at the map's rates, or in a closed loop; print which SLOs were met, with the predictions."""
    map_path, address = _split_target(target, map_file)
    says_traffic = traffic.rates_rps or traffic.concurrency or traffic.trace
    if map_path is None and not says_traffic and Path("map.json").is_file():
        map_path = Path("map.json")
    with show_progress(refresh_between=False) as show:
        result = gpuprof.load(
            address,
            map_path,
            traffic=traffic,
            access=access,
            db=verdicts.db,
            estimator=verdicts.estimator,
            progress=show,
            note=say_note,
        )
    if verdicts.output is not None:
        result.write(verdicts.output)
    _show(result, chosen, verdicts.verbose)
    if verdicts.verbose or chosen is not Format.TABLE:
        say_note(*result.warnings)
    elif result.warnings:
        say_note(f"{count_of(len(result.warnings), 'remark')} on these figures, and all of them: -v")
    if not verdicts.no_fail:
        result.require_kept()


def _split_target(target: str | None, map_file: Path | None) -> tuple[Path | None, str]:
    if target is None:
        return map_file, DEFAULT_URL
    if target.endswith(".json") or Path(target).is_file():
        if map_file is not None:
            raise InputError(f"two maps are given: {target} and {map_file}")
        return Path(target), DEFAULT_URL
    return map_file, target


def _show(result: gpuprof.LoadResult, chosen: Format, verbose: bool = False) -> None:
    if chosen is Format.JSON:
        print_json(result.document())
    elif chosen is Format.CSV:
        print_rows(result.rows(), make_columns(_COLUMNS), chosen)
    else:
        show_verdicts(result.verdicts())
    if chosen is Format.TABLE and verbose:
        unanswered = ("refused", "predicted_refused", "failed", "lost")
        rows = [
            {**row, **stages, **{key: row[key] or None for key in unanswered}}
            for row, stages in zip(result.rows(), result.stage_rows(), strict=True)
        ]
        print_text("")
        print_rows(rows, make_columns(_DETAILS, {"batches": _histogram}), chosen)
        if result.predictions:
            say_note("predicted: the same requests, replayed through the simulator on this map")


def _histogram(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    total = sum(value.values())
    parts = ((size, 100 * count / total) for size, count in sorted(value.items()) if count)
    return " ".join(f"{size}:{part:.0f}%" if part >= 0.5 else f"{size}:<1%" for size, part in parts)
