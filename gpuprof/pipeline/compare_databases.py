"""``compare A B``: two databases, or two selections of runs of a database, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

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
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.devices import database_path, open_existing
from gpuprof.pipeline.result import NoteCallback, NoteList, Result, say_nothing


@dataclass(frozen=True, kw_only=True)
class CompareDatabasesResult(Result):
    """Changes between two sides, cell by cell.

    Attributes
    ----------
    before, after : str
        Names of the sides.
    changes : tuple of CellChange
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
        lines = [self.verdict(), "", "| cell | before ms | after ms | change | smallest seen | verdict | from |"]
        lines.append("|---|---|---|---|---|---|---|")
        for change in self.changes:
            row = self._row(change)
            smallest = "–" if change.smallest is None else f"{100 * change.smallest:.1f}%"
            lines.append(
                f"| {_name_cell(change.key)} | {change.before_ms:.4g} | {change.after_ms:.4g} | "
                f"{100 * change.change:+.1f}% | {smallest} | {change.verdict.value} | {row['ops'] or '–'} |"
            )
        return "\n".join(lines) + "\n"

    def write_junit(self, path: PathArgument) -> Path:
        """Write a JUnit report with a test for each cell, which fails where the slowdown exceeds the threshold.

        Raises
        ------
        InputError
            When the file cannot be written.
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
        """Do nothing where no cell is slower by more than the threshold.

        Raises
        ------
        InfeasibleError
            When a cell is.
        """
        if slower := self.regressions:
            worst = max(slower, key=lambda change: change.change)
            raise InfeasibleError(
                f"{len(slower)} of {len(self.changes)} cells slower by more than {self.threshold_pct:g}%, "
                f"most {_name_cell(worst.key)}: {_describe(worst)}"
            )

    def _row(self, change: CellChange) -> dict[str, object]:
        key = change.key
        ops = "; ".join(
            f"{op.name} {op.before_ms:.3g} → {op.after_ms:.3g} ms" for op in self.ops.get(key, ()) if op.name
        )
        ends = {"change_low_pct": change.low, "change_high_pct": change.high, "smallest_pct": change.smallest}
        return {
            "model": key.model,
            "dims": key.dims or None,
            "device": key.device,
            "share": key.share,
            "batch": key.batch,
            "processes": key.processes,
            "before_ms": change.before_ms,
            "after_ms": change.after_ms,
            "change_pct": 100.0 * change.change,
            **{name: None if value is None else 100.0 * value for name, value in ends.items()},
            "p_value": change.p_value,
            "verdict": change.verdict.value,
            "runs_before": change.runs[0],
            "runs_after": change.runs[1],
            "unstable_runs": change.unstable,
            "ops": ops or None,
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
    note : callable, optional
        Called with each remark immediately.

    Returns
    -------
    CompareDatabasesResult

    Raises
    ------
    InputError
        When a database or a selection is wrong, or the sides have no cell in common.
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
