"""``compare``: policies for the same demands, kinds of devices, or two databases, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpuprof.domain.fleet import Fleet
from gpuprof.domain.map_sources import describe_sources
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.table import format_markdown, make_columns
from gpuprof.errors import InfeasibleError, InputError, refuse_unwritable
from gpuprof.kernel_db.comparison import (
    CellChange,
    ChangeVerdict,
    ComparedCell,
    OpChange,
    RunSelection,
    compare_cells,
    compare_ops,
    read_cells,
)
from gpuprof.pipeline.arguments import DemandsArgument, FleetArgument, PathArgument, optional_path
from gpuprof.pipeline.devices import database_path, open_existing
from gpuprof.pipeline.place import add_interval_ends
from gpuprof.pipeline.problem import PlanningOptions, build_problem
from gpuprof.pipeline.result import NoteCallback, NoteList, Progress, ProgressCallback, Result, say_nothing
from gpuprof.placement import deploy
from gpuprof.placement.deploy import Outcome
from gpuprof.placement.limit import Limit, early_stop
from gpuprof.placement.policies import DEFAULT, Policy, describe_policy, make_policy, policy_names
from gpuprof.placement.problem import Problem

#: Figures of a map in its row, in addition to cost and goodput.
_FIGURES = ("internal_slack", "external_fragmentation", "compute_utilization", "memory_utilization", "fairness")


@dataclass(frozen=True, kw_only=True)
class CompareResult(Result):
    """Plans for the same problem, by each policy or on each kind of device; a failed plan has a ``reason``.

    ``by``: subject of a row, ``"policy"`` or ``"device"``.
    """

    outcomes: tuple[Outcome, ...]
    problem: Problem
    by: str = "policy"

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each policy or kind of device: cost, goodput, idle resources, bounds, seconds."""
        limit_s = self.problem.options.time_limit_s
        rows = [{self.by: outcome.name, **_make_row(outcome, limit_s)} for outcome in self.outcomes]
        return rows if self.by == "policy" else [{**row, **self._price_row(row)} for row in rows]

    def _price_row(self, row: Mapping[str, Any]) -> dict[str, object]:
        """Return the date and interval of a device's price, and the interval of the cost by both price and latency."""
        device, million = self.problem.device(row["device"]), row["cost_per_million"]
        gpus = row["gpus_at_lower_ends"], row["gpus_at_upper_ends"]
        interval = None
        if million and device.price_per_hour and None not in gpus:
            each = million / row["gpus"] / device.price_per_hour
            prices = device.price_interval or (device.price_per_hour, device.price_per_hour)
            interval = tuple(each * price * count for price, count in zip(prices, gpus, strict=True))
        return {
            "cost_per_million_interval": interval,
            "price_interval": device.price_interval,
            "price_date": device.price_date,
        }


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

    Raises `InputError` for a file, device, model or policy that is wrong or unknown.

    Parameters
    ----------
    demands, fleet, db, options, note
        As in `gpuprof.place`; ``time_limit_s`` limits the search of each policy.
    policies : sequence of str or Policy, optional
        Names, ``"package.module:Class"``, or policies; by default all policies.

    Examples
    --------
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
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
    problem = build_problem(demands, fleet, optional_path(db), options, notes.add)
    outcomes = _plan_each("by", [(name, problem, policy) for name, policy in chosen], progress)
    _note_unserved(outcomes, notes)
    return CompareResult(notes=notes.all(), outcomes=outcomes, problem=problem)


def _note_unserved(outcomes: Sequence[Outcome], notes: NoteList) -> None:
    """Note demands that no policy serves at all, with the reason."""
    maps = [outcome.deployment for outcome in outcomes if outcome.deployment is not None]
    if not maps:
        return
    for name in maps[0].models:
        if not any(replica.model == name for deployment in maps for *_, replica in deployment.places()):
            reason = next((item.reason for item in maps[0].unplaced if item.model == name), "")
            notes.add(f"{name}: no policy serves any of it: {reason}")


def _plan_each(
    manner: str, plans: Sequence[tuple[str, Problem, Policy]], progress: ProgressCallback
) -> tuple[Outcome, ...]:
    """Return the outcomes of policies, their maps with the plans at the ends of the estimates' intervals."""
    outcomes: list[Outcome] = []
    for name, problem, policy in plans:
        progress(Progress(f"planning {manner} {name}", len(outcomes), len(plans)))
        limit = Limit(problem.options.time_limit_s)
        (outcome,) = deploy.compare(problem, [(name, policy)])
        if outcome.deployment is not None and not outcome.violations:
            outcome = replace(outcome, deployment=add_interval_ends(problem, policy, outcome.deployment, limit))
        outcomes.append(outcome)
    progress(Progress("planned", len(plans), len(plans)))
    return tuple(outcomes)


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

    Raises `InputError` for a file, device, model or policy that is wrong or unknown.

    Parameters
    ----------
    demands, fleet, db, note
        As in `gpuprof.place`; ``"any"`` stands for every device with a price.
    options : PlanningOptions
        ``time_limit_s`` limits the search on each kind.

    Examples
    --------
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(20.0))
    >>> found = gpuprof.compare_gpus([demand], fleet="t4,a100-40")
    >>> found.to_frame()[["device", "gpus", "cost_per_hour"]].to_dict("list")
    {'device': ['t4', 'a100-40'], 'gpus': [1, 1], 'cost_per_hour': [0.526, 2.7447]}
    """
    notes, planner = NoteList(note), make_policy(policy)
    problem = build_problem(demands, fleet, optional_path(db), options, notes.add)
    plans = [(entry.device.name, replace(problem, fleet=Fleet((entry,))), planner) for entry in problem.fleet.entries]
    ranked = tuple(sorted(_plan_each("on", plans, progress), key=_rank))
    return CompareResult(notes=notes.all(), outcomes=ranked, problem=problem, by="device")


def _rank(outcome: Outcome) -> tuple[bool, float, str]:
    figures = outcome.objective
    is_met = figures is not None and not outcome.violations and outcome.missing_rps == 0.0
    return not is_met, figures.cost_per_hour if figures else float("inf"), outcome.name


def _show_change(value: object) -> str:
    return f"{value:+.1f}%" if isinstance(value, int | float) else "–"


#: Texts of the figures of a cell.
SHOW: Mapping[str, Callable[[object], str]] = {
    "before_ms": NumberFormat(4),
    "after_ms": NumberFormat(4),
    "change_pct": _show_change,
    "smallest_pct": _show_change,
}


@dataclass(frozen=True, kw_only=True)
class CompareDatabasesResult(Result):
    """Changes between two sides, cell by cell.

    Attributes
    ----------
    before, after : str
        Names of the sides.
    ops : mapping of ComparedCell to tuple of OpChange
        Kernels or ops with the largest changes, for the cells that differ.
    threshold_pct : float
        Tolerated slowdown, in percent.
    false_alarms : float
        Probability that two equal sides are reported as different.
    """

    before: str
    after: str
    changes: tuple[CellChange, ...]
    ops: Mapping[ComparedCell, tuple[OpChange, ...]]
    threshold_pct: float
    false_alarms: float

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each cell: both times, the change with its interval, and the verdict."""
        return [self._row(change) for change in self.changes]

    @property
    def regressions(self) -> tuple[CellChange, ...]:
        """Cells with a slowdown above the threshold."""
        return tuple(
            change
            for change in self.changes
            if change.verdict is ChangeVerdict.SLOWER and 100.0 * change.change > self.threshold_pct
        )

    def verdict(self) -> str:
        """Return the comparison in a sentence."""
        counts = {kind: sum(change.verdict is kind for change in self.changes) for kind in ChangeVerdict}
        texts = [f"{count} {kind.value}" for kind, count in counts.items() if count]
        rate = f"at most {100 * self.false_alarms:g}% false alarms"
        return f"{self.before} → {self.after}: {', '.join(texts)} of {len(self.changes)} cells ({rate})."

    def to_markdown(self) -> str:
        """Return the comparison as markdown: the verdict, and a table of the cells."""
        rows = [{**self._row(change), "cell": _name_cell(change.key)} for change in self.changes]
        words = "cell before_ms after_ms change_pct:change smallest_pct:smallest_seen verdict ops:from"
        return f"{self.verdict()}\n\n{format_markdown(rows, make_columns(words, SHOW))}"

    def write_junit(self, path: PathArgument) -> Path:
        """Write a JUnit report with a test for each cell, which fails where the slowdown exceeds the threshold.

        Raises `InputError` when the file cannot be written.
        """
        failed, target = set(self.regressions), Path(path)
        suite = ElementTree.Element(
            "testsuite", name="gpuprof compare", tests=str(len(self.changes)), failures=str(len(failed))
        )
        for change in self.changes:
            case = ElementTree.SubElement(suite, "testcase", classname=change.key.model, name=_name_cell(change.key))
            text = _describe(change)
            if change in failed:
                ElementTree.SubElement(case, "failure", message=text).text = str(self._row(change)["ops"] or "")
            else:
                ElementTree.SubElement(case, "system-out").text = text
        with refuse_unwritable(target):
            ElementTree.ElementTree(suite).write(target, encoding="utf-8", xml_declaration=True)
        return target

    def raise_if_slower(self) -> None:
        """Raise an error if any cell is slower by more than the threshold.

        Raises `InfeasibleError` when a cell is.
        """
        if slower := self.regressions:
            worst = max(slower, key=lambda change: change.change)
            raise InfeasibleError(
                f"{len(slower)} of {len(self.changes)} cells slower by more than {self.threshold_pct:g}%, "
                f"most {_name_cell(worst.key)}: {_describe(worst)}"
            )

    def _row(self, change: CellChange) -> dict[str, object]:
        ops = (f"{op.name} {op.before_ms:.3g} → {op.after_ms:.3g} ms" for op in self.ops.get(change.key, ()) if op.name)
        ends = {"change_low_pct": change.low, "change_high_pct": change.high, "smallest_pct": change.smallest}
        return {
            **asdict(change.key),
            "dims": change.key.dims or None,
            "before_ms": change.before_ms,
            "after_ms": change.after_ms,
            "change_pct": 100.0 * change.change,
            **{name: None if value is None else 100.0 * value for name, value in ends.items()},
            "p_value": change.p_value,
            "verdict": change.verdict.value,
            "runs_before": change.runs[0],
            "runs_after": change.runs[1],
            "unstable_runs": change.unstable,
            "ops": "; ".join(ops) or None,
        }


def compare_databases(
    before: PathArgument,
    after: PathArgument,
    *,
    db: PathArgument | None = None,
    false_alarms: float = 0.01,
    threshold_pct: float = 0.0,
    note: NoteCallback = say_nothing,
) -> CompareDatabasesResult:
    """Compare two databases, or two selections of runs of a database, for every cell measured on both sides.

    Raises `InputError` when a database or a selection is wrong, or the sides have no cell in common.

    Parameters
    ----------
    before, after : path or str
        A database, or a part of its runs: ``"DB@2026-01-31"``, ``"DB@2026-01-01..2026-01-31"``,
        ``"DB@driver=550.54"`` (also ``runtime_version``, ``model_sha256``, ``host``). Without DB: of ``db``.
    db : path, optional
        Kernel database; ``GPUPROF_DB`` or ``./gpuprof-db`` unless given.
    false_alarms : float
        Probability that equal sides are reported as different, over all cells.
    threshold_pct : float
        Tolerated slowdown in percent.

    Returns
    -------
    CompareDatabasesResult
    """
    notes = NoteList(note)
    if not 0.0 < false_alarms < 1.0:
        raise InputError(f"the rate of false alarms must be above 0 and below 1 but got {false_alarms:g}", "0.01 is 1%")
    selections = [RunSelection.parse(str(side), database_path(db)) for side in (before, after)]
    databases = [open_existing(selection.path) for selection in selections]
    first, second = (
        read_cells(database, selection.find_runs(database))
        for selection, database in zip(selections, databases, strict=True)
    )
    changes = compare_cells(first, second, false_alarms)
    if not changes:
        raise InputError(
            f"{selections[0]} and {selections[1]} have no measured model, batch and share in common",
            "profile the same models on the same device for both",
        )
    if single := sum(change.verdict is ChangeVerdict.UNKNOWN for change in changes):
        notes.add(
            f"{single} of {len(changes)} cells were measured once a side, which does not tell a change from noise: "
            "gpuprof profile --force MODEL measures again (three runs a side find 5% on most machines)"
        )
    for selection, cells, other_cells in zip(selections, (first, second), (second, first), strict=True):
        if alone := len(cells.keys() - other_cells.keys()):
            notes.add(f"{alone} cells of {selection} are not on the other side")
    if unstable := sum(change.unstable > 0 for change in changes):
        notes.add(f"{unstable} of {len(changes)} cells rest on unstable runs")
    ops = {
        change.key: tuple(
            compare_ops(
                (databases[0], [run.run_id for run in first[change.key]]),
                (databases[1], [run.run_id for run in second[change.key]]),
            )
        )
        for change in changes
        if change.verdict in (ChangeVerdict.FASTER, ChangeVerdict.SLOWER)
    }
    return CompareDatabasesResult(
        notes=notes.all(),
        before=str(selections[0]),
        after=str(selections[1]),
        changes=tuple(changes),
        ops=ops,
        threshold_pct=threshold_pct,
        false_alarms=false_alarms,
    )


def _name_cell(key: ComparedCell) -> str:
    processes = f", {key.processes} processes" if key.processes > 1 else ""
    dims = f" {key.dims}" if key.dims else ""
    return f"{key.model}{dims} batch {key.batch} on {key.share} of {key.device}{processes}"


def _describe(change: CellChange) -> str:
    return f"{change.before_ms:.4g} → {change.after_ms:.4g} ms ({100 * change.change:+.1f}%), {change.verdict.value}"
