"""``gpuprof simulate``: predict the clients' view of a map, without a device."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

import gpuprof
from gpuprof.cli.options import MapFileArgument
from gpuprof.cli.output import Format, VerdictOptions, print_json, print_rows, say_note, show_progress, show_verdicts
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.plural import count_of
from gpuprof.domain.table import make_columns
from gpuprof.errors import InputError
from gpuprof.simulator.outcome import ModelOutcome, SimulationOutcome


def simulate(
    traffic: gpuprof.SimulatedTraffic,
    service: gpuprof.ServiceSettings,
    rescheduling: gpuprof.Rescheduling,
    verdicts: VerdictOptions,
    map_file: MapFileArgument = Path("map.json"),
    chosen: Format = Format.TABLE,
) -> None:
    """Replay requests against MAP: whether each SLO is kept, goodput and p99, and why it is missed; -v prints all."""
    is_rescheduled = "period_s" in rescheduling.model_fields_set
    if rescheduling.policies and not is_rescheduled:
        raise InputError("--policy says how to reschedule", "add --reschedule 60s")
    with show_progress() as show:
        result = gpuprof.simulate(
            map_file,
            traffic,
            service=service,
            rescheduling=rescheduling if is_rescheduled else None,
            db=verdicts.db,
            estimator=verdicts.estimator,
            progress=show,
            note=say_note,
        )
    if verdicts.output is not None:
        result.write(verdicts.output)
    if result.is_comparison and chosen is Format.JSON:
        print_json(result.document())
    elif result.is_comparison:
        print_rows(result.rows(), _POLICIES, chosen)
    else:
        show_outcome(result, chosen, verdicts.verbose)
        if not verdicts.no_fail:
            result.require_kept()


_SHOW = {"in_time_pct": NumberFormat(5), "begin_s": NumberFormat(5), "end_s": NumberFormat(5)}
_MODELS = "model rate_rps:requests/s goodput_rps in_time_pct slo_met:SLO_met slo_ms p50_ms p95_ms p99_ms max_ms:longest"
_REPLICAS = make_columns(
    "place:replica model batch processes throughput_rps:answered/s goodput_rps utilization:busy mean_batch p50_ms "
    "p99_ms",
    {"utilization": lambda value: f"{value:.1%}" if isinstance(value, float) else str(value)},
)

_EPOCHS = make_columns("begin_s:from_s end_s:to_s gpus:devices cost_per_hour started:replicas_started", _SHOW)

_POLICIES = make_columns(
    "policy maps started:replicas_started mean_gpus:mean_devices most_gpus:most gpu_hours:device_hours "
    "cost:$ goodput_rps in_time_pct wait_ms:mean_wait_ms worst_p99_ms",
    _SHOW,
)


def show_outcome(result: gpuprof.SimulateResult, chosen: Format, verbose: bool = False) -> None:
    """Print the verdicts and, if ``verbose``, tables of all figures; as JSON everything, as CSV the models."""
    if chosen is Format.JSON:
        print_json(result.document())
        return
    outcome = result.outcome
    rows = [asdict(model) for model in outcome.clients]
    if chosen is Format.CSV:
        print_rows(rows, make_columns(_MODELS, _SHOW), chosen)
        return
    show_verdicts(result.verdicts())
    if verbose:
        _show_tables(outcome)
    say_note(f"simulated all {outcome.requests:,} requests of {outcome.duration_s:g} s (seed {outcome.seed})")


def _show_tables(outcome: SimulationOutcome) -> None:
    """Print the models with their latency by stage and the causes of misses, the replicas, and the maps."""
    rows: list[dict[str, object]] = [
        {**asdict(model), **{f"missed_{cause}": count or None for cause, count in model.missed.items()}}
        | {f"{stage}_mean_ms": ms for stage, ms in model.stage_mean_ms.items()}
        | {f"{stage}_p99_ms": ms for stage, ms in model.stage_p99_ms.items() if stage != "network"}
        for model in (*outcome.models, *outcome.chains)
    ]
    details = [key for key in (rows[0] if rows else ()) if key not in ModelOutcome.__slots__]
    typer.echo()
    print_rows(rows, make_columns(" ".join([_MODELS, *details]), _SHOW), Format.TABLE)
    typer.echo()
    print_rows([asdict(replica) for replica in outcome.replicas], _REPLICAS, Format.TABLE, "Replicas")
    if outcome.epochs:
        typer.echo()
        print_rows([asdict(epoch) for epoch in outcome.epochs], _EPOCHS, Format.TABLE, "Maps")
        hours = sum(epoch.gpus * (epoch.end_s - epoch.begin_s) for epoch in outcome.epochs) / 3600.0
        say_note(f"{count_of(len(outcome.epochs), 'map')}, {hours:.4g} device hours")
