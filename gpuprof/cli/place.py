"""``gpuprof place``: the cheapest deployment map that keeps the SLOs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import (
    Column,
    CsvOption,
    Format,
    JsonOption,
    chosen_format,
    print_json,
    print_rows,
    print_text,
    say_note,
    show_progress,
)
from gpuprof.cli.place_options import MapOptions, PolicyOptions
from gpuprof.cli.planning_options import DemandOptions, PlanningRuleOptions
from gpuprof.cli.start_time import verb_start_s
from gpuprof.cli.table import ColumnRole
from gpuprof.domain.number_format import number_formatter
from gpuprof.domain.plural import count_of

if TYPE_CHECKING:
    from gpuprof.pipeline.place import PlaceResult

#: Nobody reads more in a terminal.
_MOST_ROWS = 60
_COLUMNS = (
    Column("node", "node", right=False, role=ColumnRole.KEY),
    Column("gpu", "gpu", role=ColumnRole.KEY),
    Column("device", "device", right=False, role=ColumnRole.KEY),
    Column("mig", "MIG", right=False, role=ColumnRole.KEY),
    Column("model", "model", right=False, role=ColumnRole.SUBJECT),
    Column("share_pct", "share %", number_formatter(), role=ColumnRole.KEY),
    Column("turns", "turns", role=ColumnRole.KEY),
    Column("processes", "procs", role=ColumnRole.KEY),
    Column("batch", "batch", role=ColumnRole.SUBJECT),
    Column("rate_rps", "req/s", number_formatter(4)),
    Column("latency_ms", "batch ms", number_formatter()),
    Column("p99_ms", "p99 ms", number_formatter()),
    Column("slo_ms", "SLO ms", number_formatter()),
    Column("utilization_pct", "busy %", number_formatter(2)),
    Column("goodput_rps", "goodput/s", number_formatter(4)),
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
    chosen, began_s = chosen_format(as_json, as_csv), verb_start_s()
    asked = demands.read_file()
    from gpuprof.pipeline.place import place as place_models

    options = rules.planning_options(policy.time_limit, policy.seed, demands.dims(), output.created)
    with show_progress() as show:
        result = place_models(
            asked,
            fleet=demands.devices(),
            db=demands.db,
            policy=policy.make_policy(),
            options=replace(options, limit_since_s=began_s),
            previous=output.previous,
            output=output.map_output(),
            progress=show,
            note=say_note,
        )
    print_map(result, chosen)
    result.write()


def print_map(result: PlaceResult, chosen: Format) -> None:
    """Print the replicas of a map and, for people, what is predicted of the whole."""
    from gpuprof.domain.map_sources import describe_basis, describe_requirements, describe_sources, record_basis
    from gpuprof.domain.map_summary import summarize_map

    deployment, rows = result.deployment, result.rows()
    if chosen is Format.JSON:
        print_json(
            {
                "policy": deployment.policy,
                "predicted": deployment.predicted.model_dump(),
                "basis": record_basis(deployment),
                "replicas": rows,
                "unplaced": [one.model_dump() for one in deployment.unplaced],
            }
        )
        return
    if rows or chosen is Format.CSV:  # a heading says nothing to people where nothing was placed
        print_rows(rows[:_MOST_ROWS] if chosen is Format.TABLE else rows, _COLUMNS, chosen)
    if chosen is Format.TABLE:
        if len(rows) > _MOST_ROWS:
            say_note(f"{count_of(len(rows) - _MOST_ROWS, 'replica')} more not shown (--json and --csv have everything)")
        print_text(summarize_map(deployment))
        if sources := describe_sources(deployment):
            print_text(f"Times: {sources}.")
        for line in filter(None, (describe_basis(deployment), describe_requirements(deployment))):
            begins = line[0] if "_" in line.split()[0] else line[0].upper()  # names of metrics are as they are
            print_text(f"{begins}{line[1:]}.")
