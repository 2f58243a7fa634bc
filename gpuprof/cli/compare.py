"""``gpuprof compare``: what each policy makes of the same demands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import (
    Column,
    CsvOption,
    Format,
    JsonOption,
    chosen_format,
    number,
    print_rows,
    progress,
    say_note,
)
from gpuprof.cli.planning_options import DemandOptions, PlanningRuleOptions

_COLUMNS = (
    Column("policy", "policy", right=False),
    Column("gpus", "GPUs"),
    Column("cost_per_hour", "$/h", number(4)),
    Column("goodput_rps", "goodput/s", number(4)),
    Column("missing_rps", "missing/s", number(4)),
    Column("internal_slack", "idle within", number(2)),
    Column("external_fragmentation", "outside", number(2)),
    Column("fairness", "fairness", number(3)),
    Column("lower_bound_gpus", "bound"),
    Column("seconds", "seconds", number(2)),
    Column("remark", "remark", right=False),
)


@dataclass(frozen=True)
class PolicyListOptions:
    """Which policies are compared, and how they search."""

    policies: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all"
    time_limit: Annotated[float | None, typer.Option(help="Seconds for each policy that searches.")] = None
    seed: Annotated[int, typer.Option(help="Of policies that draw random numbers.")] = 0

    def names(self) -> list[str] | None:
        """Return the names of the policies, None for all."""
        return None if self.policies == "all" else [name.strip() for name in self.policies.split(",") if name.strip()]


@dataclass(frozen=True)
class ComparisonRuleOptions(PlanningRuleOptions):
    """What every map must keep, and how large its replicas may be."""

    confidence: Annotated[float | None, typer.Option(help="Plan on the upper end of the intervals.")] = None


@with_groups
def compare(
    demands: DemandOptions,
    policies: PolicyListOptions,
    rules: ComparisonRuleOptions,
    picture: Annotated[Path | None, typer.Option(help="Draw the maps into this .svg or .png file.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Place the same demands by several policies, with one estimator and one check, and show what each needs."""
    from gpuprof.pipeline.compare import check_picture
    from gpuprof.pipeline.compare import compare as compare_policies

    chosen = chosen_format(as_json, as_csv)
    if picture is not None:
        check_picture(picture)
    with progress() as bar:
        task = bar.add_task("policies", total=None)
        result = compare_policies(
            demands.slo_file,
            fleet=demands.devices(),
            db=demands.db,
            policies=policies.names(),
            options=rules.planning_options(policies.time_limit, policies.seed),
            progress=lambda step: bar.update(task, total=step.total, completed=step.done),
            note=say_note,
        )
    print_rows(result.rows(), _COLUMNS, chosen)
    if picture is not None:
        result.draw(picture)
        if chosen is Format.TABLE:
            say_note(f"drawn to {picture}")
