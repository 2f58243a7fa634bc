"""``compare``: the maps of several policies for the same demands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap, PlanAtEnds, share_of
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.map_sources import describe_sources, is_observed
from gpuprof.errors import InputError
from gpuprof.pipeline.arguments import DemandsArgument, FleetArgument, PathArgument, optional_path
from gpuprof.pipeline.place import add_interval_ends, plan_at_end
from gpuprof.pipeline.planning_options import DEFAULT_LIMIT_S, PlanningOptions
from gpuprof.pipeline.problem import build_problem
from gpuprof.pipeline.result import NoteCallback, NoteList, Progress, ProgressCallback, Result, say_nothing
from gpuprof.placement import comparison
from gpuprof.placement.comparison import Outcome
from gpuprof.placement.early_stop import early_stop
from gpuprof.placement.limit import Limit
from gpuprof.placement.policies import DEFAULT, Policy, describe_policy, make_policy, policy_names
from gpuprof.placement.problem import MEANS, Problem

#: Figures of a map in its row, in addition to cost and goodput.
_FIGURES = ("internal_slack", "external_fragmentation", "compute_utilization", "memory_utilization", "fairness")


@dataclass(frozen=True, kw_only=True)
class CompareResult(Result):
    """Each policy's solution of the same problem; a failed policy has a ``reason``."""

    outcomes: tuple[Outcome, ...]
    problem: Problem

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each policy: devices, cost, goodput, idle resources, bounds and seconds."""
        return [_make_row(outcome, self.problem.options.time_limit_s) for outcome in self.outcomes]

    def draw(self, path: PathArgument) -> Path:
        """Draw the maps into an .svg or .png file and return its path.

        Raises
        ------
        InputError
            When the name has another ending, or the file cannot be written.
        UnavailableError
            For a .png when the drawing library is not installed.
        """
        from gpuprof.reporting.map_figures import map_figure
        from gpuprof.reporting.picture import write_picture

        target = Path(path)
        devices = {entry.device.name: entry.device for entry in self.problem.fleet.entries}
        pairs = [(outcome, outcome.deployment) for outcome in self.outcomes if outcome.deployment]
        models = list(dict.fromkeys(model for _, deployment in pairs for model in deployment.models))
        charts = [
            map_figure(deployment, devices, title=f"{outcome.policy}: {_count_gpus(outcome)} devices", models=models)
            for outcome, deployment in pairs
        ]
        write_picture(charts, target)
        return target


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
        As in `gpuprof.place`; ``time_limit_s`` limits the search of each policy, by default to 5 seconds.
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
    for count, policy in enumerate(chosen):
        progress(Progress(f"planning by {policy[0]}", count, len(chosen)))
        limit = Limit(options.time_limit_s)
        outcomes += (
            _add_interval_ends(problem, policy[1], outcome, limit) for outcome in comparison.compare(problem, [policy])
        )
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


def _add_interval_ends(problem: Problem, policy: Policy, outcome: Outcome, spent: Limit) -> Outcome:
    if outcome.deployment is None or outcome.violations:
        return outcome
    return replace(outcome, deployment=add_interval_ends(problem, policy, outcome.deployment, spent))


def _make_row(outcome: Outcome, time_limit_s: float | None) -> dict[str, object]:
    figures, deployment = outcome.objective, outcome.deployment
    remark = outcome.reason
    if outcome.violations:
        remark = f"NOT SOUND, {len(outcome.violations)} rules broken, first: {outcome.violations[0]}"
    elif deployment is not None:
        remark = early_stop(deployment, time_limit_s) or remark
    return {
        "policy": outcome.policy,
        **{name: getattr(figures, name, None) for name in ("gpus", "cost_per_hour", "goodput_rps")},
        "missing_rps": None if figures is None else outcome.missing_rps,
        **{name: getattr(figures, name, None) for name in _FIGURES},
        "lower_bound_gpus": None if deployment is None else deployment.predicted.lower_bound_gpus,
        "gpus_at_lower_ends": _gpus_at(None if deployment is None else deployment.predicted.at_lower_ends),
        "gpus_at_upper_ends": _gpus_at(None if deployment is None else deployment.predicted.at_upper_ends),
        "sources": None if deployment is None else describe_sources(deployment),
        "seconds": outcome.seconds,
        "remark": remark,
    }


def _gpus_at(end: PlanAtEnds | None) -> int | None:
    return None if end is None else end.gpus


def _count_gpus(outcome: Outcome) -> int:
    return 0 if outcome.deployment is None else sum(len(node.gpus) for node in outcome.deployment.nodes)


@dataclass(frozen=True, slots=True)
class GpuOutcome:
    """The plan of the demands on one kind of device."""

    device: str
    by_means: Outcome  #: Planned on the estimates' values.
    #: Planned as `gpuprof.place` does with these options: by default on the upper ends of the intervals of all
    #: unmeasured times. Equals ``by_means`` where every time was measured.
    by_upper_ends: Outcome
    #: The plan at the lower ends of the intervals; None where every time was measured or time ran out.
    at_lower_ends: PlanAtEnds | None
    #: Largest ratio of upper end to value among the replicas' times; None where an interval is unknown.
    interval_factor: float | None
    sources: str  #: Measured part of the map.


@dataclass(frozen=True, kw_only=True)
class CompareGpusResult(Result):
    """Plans of the same demands on each kind of device, the cheapest complete plan at the upper ends first."""

    outcomes: tuple[GpuOutcome, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each kind: number, cost, utilisation, bound, and how sure they are."""
        return [_row(outcome) for outcome in self.outcomes]


def compare_gpus(
    demands: DemandsArgument = Path("slo.csv"),
    *,
    fleet: FleetArgument | None = None,
    db: PathArgument | None = None,
    policy: str | Policy = DEFAULT,
    options: PlanningOptions = PlanningOptions(),  # noqa: B008 - frozen
    progress: ProgressCallback = say_nothing,
    note: NoteCallback = say_nothing,
) -> CompareGpusResult:
    """Place the same demands on each kind of device alone.

    Parameters
    ----------
    demands, fleet, db, note
        As in `gpuprof.place`; ``"any"`` stands for every device with a price.
    policy : str or Policy
    options : PlanningOptions
        Each unmeasured kind is planned on the estimates' values and on both ends of their intervals. ``time_limit_s``
        limits each plan, by default to 5 seconds.
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
    notes = NoteList(note)
    chosen = make_policy(policy)  # an unknown policy is refused before anything is read
    limited = options.replace(time_limit_s=options.time_limit_s or DEFAULT_LIMIT_S)
    problem = build_problem(demands, fleet, optional_path(db), limited, notes.add)
    outcomes: list[GpuOutcome] = []
    for count, entry in enumerate(problem.fleet.entries):
        progress(Progress(f"planning on {entry.device.name}", count, len(problem.fleet.entries)))
        outcomes.append(_compare_kind(problem, entry, chosen))
    progress(Progress("planned", len(problem.fleet.entries), len(problem.fleet.entries)))
    return CompareGpusResult(notes=notes.all(), outcomes=tuple(sorted(outcomes, key=_order)))


def _compare_kind(problem: Problem, entry: FleetEntry, policy: Policy) -> GpuOutcome:
    alone = replace(problem, fleet=Fleet((entry,)))
    means = replace(alone, options=replace(alone.options, confidence=MEANS))
    (by_means,) = comparison.compare(means, [("", policy)])
    deployment = by_means.deployment
    is_measured = deployment is not None and is_observed(deployment)
    careful, lower = by_means, None
    if not is_measured or problem.options.confidence is not None:
        (careful,) = comparison.compare(alone, [("", policy)])
    if not is_measured and deployment is not None:
        lower = plan_at_end(alone, policy, "lower", problem.options.time_limit_s or DEFAULT_LIMIT_S)
    return GpuOutcome(
        entry.device.name,
        by_means,
        careful,
        lower,
        None if deployment is None else _interval_factor(problem, entry, deployment),
        "" if deployment is None else describe_sources(deployment),
    )


def _interval_factor(problem: Problem, entry: FleetEntry, deployment: DeploymentMap) -> float | None:
    """Return the largest ratio of upper end to value among the replicas' times; None where a time has no interval."""
    factors = []
    for _, _, partition, replica in deployment.places():
        share = share_of(partition, replica)
        try:
            figure = problem.estimator.estimate(
                replica.model, entry.device, replica.batch, share, (), replica.processes
            ).latency_ms
        except InputError:
            return None
        if figure.high is None:
            if not figure.is_observed:
                return None
            factors.append(1.0)
        else:
            factors.append(figure.high / figure.value)
    return max(factors, default=None)


def _order(outcome: GpuOutcome) -> tuple[bool, float, str]:
    figures = outcome.by_upper_ends.objective
    return not _is_met(outcome.by_upper_ends), figures.cost_per_hour if figures else float("inf"), outcome.device


def _is_met(outcome: Outcome) -> bool:
    return outcome.objective is not None and not outcome.violations and outcome.missing_rps == 0.0


def _row(outcome: GpuOutcome) -> dict[str, object]:
    means, figures = outcome.by_means, outcome.by_means.objective
    careful = outcome.by_upper_ends.objective
    deployment = means.deployment
    remark = means.reason
    if deployment is not None and deployment.unplaced:
        remark = f"{deployment.unplaced[0].model}: {deployment.unplaced[0].reason}"
    if not _is_met(outcome.by_upper_ends) and not remark:
        remark = "not every demand is met at the upper ends of the intervals"
    if means.violations:
        remark = f"NOT SOUND, first broken rule: {means.violations[0]}"
    return {
        "device": outcome.device,
        "gpus": None if figures is None else figures.gpus,
        "cost_per_hour": None if figures is None else figures.cost_per_hour,
        "gpus_at_lower_ends": None if outcome.at_lower_ends is None else outcome.at_lower_ends.gpus,
        "gpus_at_upper_end": None if careful is None else careful.gpus,
        "cost_per_hour_at_upper_end": None if careful is None else careful.cost_per_hour,
        "utilization_pct": None if figures is None else 100.0 * figures.compute_utilization,
        "missing_rps": None if figures is None else means.missing_rps,
        "lower_bound_gpus": None if deployment is None else deployment.predicted.lower_bound_gpus,
        "interval_factor": outcome.interval_factor,
        "sources": outcome.sources,
        "seconds": means.seconds + (0.0 if outcome.by_upper_ends is means else outcome.by_upper_ends.seconds),
        "remark": remark,
    }
