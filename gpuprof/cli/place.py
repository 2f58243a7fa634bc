"""``gpuprof place``: the cheapest deployment map that keeps the SLOs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import gpuprof
from gpuprof.cli.output import Format, print_json, print_rows, print_text, say_note, show_progress
from gpuprof.domain.map_sources import describe_basis, describe_certainty, describe_sources, record_basis, summarize_map
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.plural import count_of
from gpuprof.domain.table import make_columns
from gpuprof.domain.validation import collect_distinct
from gpuprof.pipeline.settings import Settings, option
from gpuprof.placement.policies import DEFAULT, make_policy

_COLUMNS = make_columns(
    "node gpu device mig model share_pct turns processes batch rate_rps latency_ms:batch_ms p99_ms slo_ms "
    "utilization_pct:busy_% goodput_rps source",
    {"utilization_pct": NumberFormat(2)},
)


class DemandOptions(Settings):
    """Demands, and the devices to place them on."""

    title: ClassVar[str] = "Demands and devices"

    slo_file: Path = option(Path("slo.csv"), "CSV file with the columns model,rate_rps,slo_ms.")
    gpus: str | None = option(
        None,
        "Devices to place on: a100-80:8,v100, any, or a TOML file with devices, counts and prices; without a count, as "
        "many as needed.",
        values="devices",
    )
    db: Path | None = option(None, "Kernel database.")


class PolicyOptions(Settings):
    """Policy, and the running map."""

    title: ClassVar[str] = "Search"

    policy: str = option(DEFAULT, "Policy by name, or package.module:Class.", values="policies")
    policy_option: tuple[str, ...] = option(
        (), "Option of the policy as KEY=VALUE; may be repeated.", "-O", "--policy-option", repeated=True
    )
    previous: Path | None = option(
        None,
        "Running map; among equally good maps, that with the fewest moved replicas is taken.",
        "--from",
        metavar="MAP",
        panel="Output",
    )


def place(
    demands: DemandOptions,
    rules: gpuprof.PlanningOptions,
    search: PolicyOptions,
    output: gpuprof.MapOutput,
    chosen: Format = Format.TABLE,
) -> None:
    """Decide which replicas run where, so that every SLO is kept at the least cost, and write the map."""
    with show_progress() as show:
        result = gpuprof.place(
            demands.slo_file,
            fleet=demands.gpus,
            db=demands.db,
            policy=make_policy(search.policy, parse_pairs(search.policy_option)),
            options=rules,
            previous=search.previous,
            output=output,
            progress=show,
            note=say_note,
        )
    print_map(result, chosen)
    is_replaced = output.path.exists()
    path = result.write()
    say_note(f"{'replaced' if is_replaced else 'wrote'} {path}")
    if configurations := result.configurations():
        options = f"{output.triton_repository}/{next(name for name in configurations if name.endswith('.options'))}"
        count = sum(name.endswith(".pbtxt") for name in configurations)
        say_note(
            f"wrote {count_of(count, 'configuration')} into {output.triton_repository}: start it with "
            f"tritonserver --model-repository={output.triton_repository} $(cat {options})"
        )


def print_map(result: gpuprof.PlaceResult, chosen: Format) -> None:
    """Print the replicas of a map and, in a table, the predictions for the whole map."""
    deployment, rows = result.deployment, result.rows()
    if chosen is Format.JSON:
        print_json(
            {
                "policy": deployment.policy,
                "predicted": deployment.predicted.model_dump(),
                "basis": record_basis(deployment),
                "replicas": rows,
                "unplaced": [demand.model_dump() for demand in deployment.unplaced],
            }
        )
        return
    if rows or chosen is Format.CSV:  # an empty table has no use for people
        print_rows(rows, _COLUMNS, chosen)
    if chosen is Format.TABLE:
        print_text(summarize_map(deployment))
        if sources := describe_sources(deployment):
            print_text(f"Times: {sources}. {describe_certainty(deployment)}")
        if basis := describe_basis(deployment):
            print_text(f"{basis[0].upper()}{basis[1:]}.")


def parse_pairs(options: Sequence[str]) -> dict[str, str]:
    """Return ``KEY=VALUE`` words as a dict; a KEY alone is a set flag.

    Raises `InputError` when a key stands twice.
    """
    pairs = (text.partition("=") for text in options)
    return collect_distinct("the option", ((key, value) for key, _, value in pairs))
