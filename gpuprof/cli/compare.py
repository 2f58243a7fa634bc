"""``gpuprof compare``: what each policy makes of the same demands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import Column, CsvOption, Format, JsonOption, chosen_format, number, print_rows, say
from gpuprof.cli.planning_options import Asked, Rules
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.placement.comparison import Outcome
    from gpuprof.placement.policies import Policy
    from gpuprof.placement.problem import Problem

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
class Contest:
    """Which policies are compared, and how they search."""

    policies: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all"
    time_limit: Annotated[float | None, typer.Option(help="Seconds for each policy that searches.")] = None
    seed: Annotated[int, typer.Option(help="Of policies that draw random numbers.")] = 0

    def made(self) -> list[tuple[str, Policy]]:
        """Return the policies, each with its name.

        Raises
        ------
        InputError
            When there is none of a name.
        """
        from gpuprof.placement.policies import make_policy, policy_names

        named = [name.strip() for name in self.policies.split(",") if name.strip()]
        return [(name, make_policy(name)) for name in (policy_names() if self.policies == "all" else named)]


@dataclass(frozen=True)
class SameRules(Rules):
    """What every map must keep, and how large its replicas may be."""

    confidence: Annotated[float | None, typer.Option(help="Plan on the upper end of the intervals.")] = None


@with_groups
def compare(
    asked: Asked,
    contest: Contest,
    rules: SameRules,
    picture: Annotated[Path | None, typer.Option(help="Draw the maps into this .svg or .png file.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Place the same demands by several policies, with one estimator and one check, and show what each needs."""
    from gpuprof.placement.comparison import compare as run

    chosen = chosen_format(as_json, as_csv)
    if picture is not None and picture.suffix not in {".svg", ".png"}:
        raise InputError(f"a picture is .svg or .png but got {picture}")
    options = rules.options(contest.time_limit, contest.seed)
    policies = contest.made()
    problem = asked.problem(options, rules.overhead_ms)
    outcomes = run(problem, policies)
    print_rows([_row(outcome) for outcome in outcomes], _COLUMNS, chosen)
    if picture is not None:
        _draw(outcomes, problem, picture)
        if chosen is Format.TABLE:
            say(f"gpuprof: drawn to {picture}")


def _row(outcome: Outcome) -> dict[str, object]:
    figures, deployment = outcome.objective, outcome.deployment
    remark = outcome.reason
    if outcome.violations:
        remark = f"NOT SOUND, {len(outcome.violations)} rules broken, first: {outcome.violations[0]}"
    return {
        "policy": outcome.policy,
        "gpus": None if figures is None else figures.gpus,
        "cost_per_hour": None if figures is None else figures.cost_per_hour,
        "goodput_rps": None if figures is None else figures.goodput_rps,
        "missing_rps": None if figures is None else outcome.missing_rps,
        "internal_slack": None if figures is None else figures.internal_slack,
        "external_fragmentation": None if figures is None else figures.external_fragmentation,
        "compute_utilization": None if figures is None else figures.compute_utilization,
        "memory_utilization": None if figures is None else figures.memory_utilization,
        "fairness": None if figures is None else figures.fairness,
        "lower_bound_gpus": None if deployment is None else deployment.predicted.lower_bound_gpus,
        "seconds": outcome.seconds,
        "remark": remark,
    }


def _draw(outcomes: Sequence[Outcome], problem: Problem, path: Path) -> None:
    from gpuprof.placement.bitmap import to_png
    from gpuprof.placement.picture import draw, to_svg

    devices = {entry.device.name: entry.device for entry in problem.fleet.entries}
    maps = [(f"{one.policy}: {len(_used(one))} devices", one.deployment) for one in outcomes if one.deployment]
    scene = draw(maps, devices)
    content = to_svg(scene).encode() if path.suffix == ".svg" else to_png(scene)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def _used(outcome: Outcome) -> list[object]:
    return [] if outcome.deployment is None else [gpu for node in outcome.deployment.nodes for gpu in node.gpus]
