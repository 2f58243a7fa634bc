"""``gpuprof place``: the cheapest deployment map that keeps the SLOs."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import (
    Column,
    CsvOption,
    Format,
    JsonOption,
    chosen_format,
    number,
    print_json,
    print_rows,
    say_note,
    show_progress,
)
from gpuprof.cli.place_options import MapOptions, PolicyOptions
from gpuprof.cli.planning_options import DemandOptions, PlanningRuleOptions
from gpuprof.cli.table import ColumnRole

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.pipeline.place import PlaceResult

_COLUMNS = (
    Column("node", "node", right=False, role=ColumnRole.KEY),
    Column("gpu", "gpu", role=ColumnRole.KEY),
    Column("device", "device", right=False, role=ColumnRole.KEY),
    Column("mig", "MIG", right=False, role=ColumnRole.KEY),
    Column("model", "model", right=False, role=ColumnRole.SUBJECT),
    Column("share_pct", "share %", number(), role=ColumnRole.KEY),
    Column("processes", "procs", role=ColumnRole.KEY),
    Column("batch", "batch", role=ColumnRole.SUBJECT),
    Column("rate_rps", "req/s", number(4)),
    Column("latency_ms", "batch ms", number()),
    Column("p99_ms", "p99 ms", number()),
    Column("slo_ms", "SLO ms", number()),
    Column("utilization_pct", "busy %", number(2)),
    Column("goodput_rps", "goodput/s", number(4)),
    Column("source", "from", right=False),
)


@with_groups
def place(
    demands: DemandOptions,
    policy: PolicyOptions,
    rules: PlanningRuleOptions,
    output: MapOptions,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Decide which replicas run where, so that every SLO is kept at the least cost, and write the map."""
    from gpuprof.pipeline.place import place as place_models

    chosen = chosen_format(as_json, as_csv)
    with show_progress() as show:
        result = place_models(
            demands.slo_file,
            fleet=demands.devices(),
            db=demands.db,
            policy=policy.make_policy(),
            options=rules.planning_options(policy.time_limit, policy.seed, output.created, demands.dims()),
            previous=output.previous,
            output=output.map_output(),
            progress=show,
            note=say_note,
        )
    print_map(result, chosen)
    result.write()


def print_map(result: PlaceResult, chosen: Format) -> None:
    """Print the replicas of a map and, for people, what is predicted of the whole."""
    from gpuprof.domain.map_sources import describe_basis, describe_sources

    deployment, rows = result.deployment, result.rows()
    if chosen is Format.JSON:
        print_json(
            {
                "policy": deployment.policy,
                "predicted": deployment.predicted.model_dump(),
                "replicas": rows,
                "unplaced": [one.model_dump() for one in deployment.unplaced],
            }
        )
        return
    print_rows(rows, _COLUMNS, chosen)
    if chosen is Format.TABLE:
        sys.stdout.write(_summary(deployment) + "\n")
        if sources := describe_sources(deployment):
            sys.stdout.write(f"times: {sources}\n")
        if basis := describe_basis(deployment):
            sys.stdout.write(f"{basis}\n")


def _summary(deployment: DeploymentMap) -> str:
    from gpuprof.domain.map_sources import describe_bounds

    predicted, show = deployment.predicted, number(4)
    kinds = Counter(gpu.device for node in deployment.nodes for gpu in node.gpus)
    words = [" + ".join(f"{count} × {name}" for name, count in kinds.items()) or "no devices"]
    if predicted.cost_per_hour is not None:
        words.append(f"{show(predicted.cost_per_hour)} $/h")
    words.append(f"goodput {show(predicted.goodput_rps)} requests/s")
    if predicted.internal_slack is not None and predicted.external_fragmentation is not None:
        words.append(f"idle within shares {100 * predicted.internal_slack:.0f}%")
        words.append(f"outside shares {100 * predicted.external_fragmentation:.0f}%")
    if bounds := describe_bounds(deployment):
        words.append(bounds)
    if predicted.lower_bound_cost_per_hour is not None and predicted.cost_per_hour is not None and len(kinds) > 1:
        words.append(f"at least {show(predicted.lower_bound_cost_per_hour)} $/h")
    if predicted.upper_bound_goodput_rps is not None:
        words.append(f"at most {show(predicted.upper_bound_goodput_rps)} requests/s by any map by these estimates")
    if predicted.moves is not None:
        words.append(f"{predicted.moves} of {sum(1 for _ in deployment.places())} replicas move")
    return f"{deployment.policy}: {', '.join(words)}"
