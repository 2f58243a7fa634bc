"""``compare``: maps for the same demands, by several policies or on each kind of device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuprof.domain.fleet import Fleet
from gpuprof.domain.map_sources import describe_sources
from gpuprof.errors import InputError
from gpuprof.pipeline.arguments import DemandsArgument, FleetArgument, PathArgument, optional_path
from gpuprof.pipeline.place import add_interval_ends
from gpuprof.pipeline.problem import DEFAULT_LIMIT_S, PlanningOptions, build_problem
from gpuprof.pipeline.result import NoteCallback, NoteList, Progress, ProgressCallback, Result, say_nothing
from gpuprof.placement import comparison
from gpuprof.placement.comparison import Outcome
from gpuprof.placement.limit import Limit, early_stop
from gpuprof.placement.policies import DEFAULT, Policy, describe_policy, make_policy, policy_names
from gpuprof.placement.problem import Problem

#: Figures of a map in its row, in addition to cost and goodput.
_FIGURES = ("internal_slack", "external_fragmentation", "compute_utilization", "memory_utilization", "fairness")


@dataclass(frozen=True, kw_only=True)
class CompareResult(Result):
    """Solutions of the same problem, of each policy or on each kind of device; a failure has a ``reason``.

    ``by``: subject of a row, ``"policy"`` or ``"device"``.
    """

    outcomes: tuple[Outcome, ...]
    problem: Problem
    by: str = "policy"

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each policy or kind of device: cost, goodput, idle resources, bounds, seconds."""
        limit_s = self.problem.options.time_limit_s
        return [{self.by: outcome.name, **_make_row(outcome, limit_s)} for outcome in self.outcomes]


def compare(
    demands: DemandsArgument = Path("slo.csv"),
    *,
    fleet: FleetArgument | None = None,
    db: PathArgument | None = None,
    policies: Sequence[str | Policy] | None = None,
    options: PlanningOptions = PlanningOptions(),  # noqa: B008 - frozen
    progress: ProgressCallback = say_nothing,
    note: NoteCallback = say_nothing,
) -> CompareResult:
    """Place the same demands by several policies, with one estimator and one check.

    Parameters
    ----------
    demands, fleet, db, options, note
        As in `gpuprof.place`; ``time_limit_s`` limits the search of each policy.
    policies : sequence of str or Policy, optional
        Names, ``"package.module:Class"``, or policies; by default all policies.
    progress : callable, optional
        Called after each policy.

    Raises
    ------
    InputError
        For a file, device, model or policy that is wrong or unknown.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", Path(tempfile.mkdtemp()) / "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(20.0))
    >>> found = gpuprof.compare([demand], fleet="a100-40", policies=["ffd", "optimal"])
    >>> found.to_frame()[["policy", "gpus"]].to_dict("list")
    {'policy': ['ffd', 'optimal'], 'gpus': [1, 1]}
    """
    notes = NoteList(note)
    sources = policy_names() if policies is None else policies
    chosen = [(describe_policy(source), make_policy(source)) for source in sources]
    if not chosen:
        raise InputError("no policy is named", f"known: {', '.join(policy_names())}")
    options = options.replace(time_limit_s=options.time_limit_s or DEFAULT_LIMIT_S)
    problem = build_problem(demands, fleet, optional_path(db), options, notes.add)
    outcomes: list[Outcome] = []
    for count, (name, policy) in enumerate(chosen):
        progress(Progress(f"planning by {name}", count, len(chosen)))
        outcomes.append(_plan(problem, name, policy))
    progress(Progress("planned", len(chosen), len(chosen)))
    _note_unserved(outcomes, notes)
    return CompareResult(notes=notes.all(), outcomes=tuple(outcomes), problem=problem)


def _note_unserved(outcomes: Sequence[Outcome], notes: NoteList) -> None:
    """Note demands that no policy serves at all, with the reason."""
    maps = [outcome.deployment for outcome in outcomes if outcome.deployment is not None]
    if not maps:
        return
    for name in maps[0].models:
        if not any(replica.model == name for deployment in maps for *_, replica in deployment.places()):
            reason = next((item.reason for item in maps[0].unplaced if item.model == name), "")
            notes.add(f"{name}: no policy serves any of it: {reason}")


def _plan(problem: Problem, name: str, policy: Policy) -> Outcome:
    """Return the outcome of a policy, its map with the plans at the ends of the estimates' intervals."""
    limit = Limit(problem.options.time_limit_s)
    (outcome,) = comparison.compare(problem, [(name, policy)])
    if outcome.deployment is None or outcome.violations:
        return outcome
    return replace(outcome, deployment=add_interval_ends(problem, policy, outcome.deployment, limit))


def _make_row(outcome: Outcome, time_limit_s: float | None) -> dict[str, object]:
    figures, deployment = outcome.objective, outcome.deployment
    remark = outcome.reason
    if outcome.violations:
        remark = f"NOT SOUND, {len(outcome.violations)} rules broken, first: {outcome.violations[0]}"
    elif deployment is not None:
        remark = early_stop(deployment, time_limit_s) or remark
    lower = deployment and deployment.predicted.at_lower_ends
    upper = deployment and deployment.predicted.at_upper_ends
    served_per_hour = 3600.0 * (figures.goodput_rps if figures else 0.0)
    return {
        **{name: getattr(figures, name, None) for name in ("gpus", "cost_per_hour", "goodput_rps")},
        "cost_per_million": 1e6 * figures.cost_per_hour / served_per_hour if figures and served_per_hour else None,
        "missing_rps": None if figures is None else outcome.missing_rps,
        **{name: getattr(figures, name, None) for name in _FIGURES},
        "lower_bound_gpus": None if deployment is None else deployment.predicted.lower_bound_gpus,
        "gpus_at_lower_ends": lower and lower.gpus,
        "gpus_at_upper_ends": upper and upper.gpus,
        "sources": None if deployment is None else describe_sources(deployment),
        "seconds": outcome.seconds,
        "remark": remark,
    }


def compare_gpus(
    demands: DemandsArgument = Path("slo.csv"),
    *,
    fleet: FleetArgument | None = None,
    db: PathArgument | None = None,
    policy: str | Policy = DEFAULT,
    options: PlanningOptions = PlanningOptions(),  # noqa: B008 - frozen
    progress: ProgressCallback = say_nothing,
    note: NoteCallback = say_nothing,
) -> CompareResult:
    """Place the same demands on each kind of device alone; the cheapest complete plan comes first.

    Parameters
    ----------
    demands, fleet, db, note
        As in `gpuprof.place`; ``"any"`` stands for every device with a price.
    policy : str or Policy
    options : PlanningOptions
        ``time_limit_s`` limits the search on each kind.
    progress : callable, optional
        Called after each kind.

    Raises
    ------
    InputError
        For a file, device, model or policy that is wrong or unknown.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", Path(tempfile.mkdtemp()) / "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(20.0))
    >>> found = gpuprof.compare_gpus([demand], fleet="t4,a100-40")
    >>> found.to_frame()[["device", "gpus", "cost_per_hour"]].to_dict("list")
    {'device': ['t4', 'a100-40'], 'gpus': [1, 1], 'cost_per_hour': [0.526, 2.7447]}
    """
    notes, planner = NoteList(note), make_policy(policy)
    options = options.replace(time_limit_s=options.time_limit_s or DEFAULT_LIMIT_S)
    problem = build_problem(demands, fleet, optional_path(db), options, notes.add)
    entries = problem.fleet.entries
    outcomes: list[Outcome] = []
    for count, entry in enumerate(entries):
        progress(Progress(f"planning on {entry.device.name}", count, len(entries)))
        outcomes.append(_plan(replace(problem, fleet=Fleet((entry,))), entry.device.name, planner))
    progress(Progress("planned", len(entries), len(entries)))
    ranked = tuple(sorted(outcomes, key=_rank))
    return CompareResult(notes=notes.all(), outcomes=ranked, problem=problem, by="device")


def _rank(outcome: Outcome) -> tuple[bool, float, str]:
    figures = outcome.objective
    is_met = figures is not None and not outcome.violations and outcome.missing_rps == 0.0
    return not is_met, figures.cost_per_hour if figures else float("inf"), outcome.name
