"""Compares two sets of runs cell by cell: faster, slower or no difference, at a stated rate of false alarms.

A cell is a model at a batch size, share, number of processes and sizes, on a device. Its figure in a run is the
logarithm of the median latency; Student's test compares the means of both sides' runs. Alarms are held to the stated
rate over the whole comparison (Holm 1979), so that a nightly job with a hundred cells alarms no more often than a job
with two.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from gpuprof.domain.share import Share
from gpuprof.errors import InputError, unknown_name
from gpuprof.kernel_db.records import read_records, run_query
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb

#: Probability of detecting a change as large as the reported smallest change.
POWER = 0.95
#: Columns of a run usable for the selection of a side.
_RUN_KEYS = ("runtime_version", "driver", "model_sha256", "host", "gpuprof_version", "collector", "run_id")
#: Fewest cells for raising the variance of a cell to at least the mean variance, which adds as many degrees of freedom.
#: With spreads differing up to threefold between cells, alarms then stay at the stated rate, and three runs a
#: side detect 5% at a spread of 0.6% (`tests/kernel_db/test_comparison.py`).
_LEAST_CELLS = 4
#: Milliseconds in a batch of each kernel, and of each op, in each run.
_KERNEL_MS = """
select k.run_id, name, sum(duration_ns) / 1e6 / max(repeats) from kernels k
join (select run_id, count(distinct repeat) as repeats from kernels where duration_ns is not null group by run_id) r
  on k.run_id = r.run_id
where duration_ns is not null group by k.run_id, name
"""
_OP_MS = """
select run_id, name || ' (' || op_type || ')', sum(duration_p50_ns) / 1e6 from ops
where duration_p50_ns is not null group by all
"""


class ChangeVerdict(StrEnum):
    """Outcome of a test."""

    FASTER = "faster"
    SLOWER = "slower"
    NONE = "no difference"
    UNKNOWN = "unknown"  #: Measured once per side: a change cannot be distinguished from noise.


@dataclass(frozen=True, slots=True, order=True)
class ComparedCell:
    """A workload that both sides measured."""

    model: str
    device: str
    share: str
    batch: int
    processes: int = 1
    dims: str = ""


@dataclass(frozen=True, slots=True)
class CellRun:
    """A cell's result in a run: latency in ms, relative standard error within the run, and stability."""

    latency_ms: float
    error: float = 0.0
    stable: bool = True
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class CellChange:
    """Change of a cell's latency between two sides."""

    key: ComparedCell
    #: ``before_ms``, ``after_ms``: Geometric mean of the runs' median latencies.
    before_ms: float
    after_ms: float
    change: float  #: Relative change of the latency; 0.05: 5% slower.
    #: ``low``, ``high``: Ends of the change's confidence interval for this cell alone, at confidence 1 - rate of false
    #: alarms.
    low: float | None
    high: float | None
    smallest: float | None  #: Smallest slowdown detectable with probability `POWER`.
    p_value: float | None  #: p-value of this cell alone.
    verdict: ChangeVerdict  #: Verdict at the stated rate of false alarms over all cells.
    runs: tuple[int, int]  #: Runs on each side.
    unstable: int  #: Runs marked unstable, both sides together.


@dataclass(frozen=True, slots=True)
class OpChange:
    """Difference of an op's or a kernel's time between two sides, in ms per batch, and its part of the total."""

    name: str
    before_ms: float
    after_ms: float


def compare_cells(
    before: Mapping[ComparedCell, Sequence[CellRun]],
    after: Mapping[ComparedCell, Sequence[CellRun]],
    false_alarms: float = 0.01,
) -> list[CellChange]:
    """Return the changes of the cells common to both sides, ordered by their keys.

    ``false_alarms``: probability of reporting a difference between two equal sides.
    """
    keys = sorted(before.keys() & after.keys())
    sides = {key: (_logs(before[key]), _logs(after[key])) for key in keys}
    variances = {key: _pool_variance(*side) for key, side in sides.items()}
    repeated = [variance for variance, freedom in variances.values() if freedom]
    is_shared = len(repeated) >= _LEAST_CELLS
    shared_variance, extra_freedom = (statistics.fmean(repeated), _LEAST_CELLS) if is_shared else (0.0, 0)
    tests: dict[ComparedCell, tuple[float, float, float]] = {}  # difference, its standard error, degrees of freedom
    for key, (first, second) in sides.items():
        variance, freedom = variances[key]
        if freedom:
            run_variance = statistics.fmean(run.error**2 for run in (*before[key], *after[key]))
            error = math.sqrt(max(variance, shared_variance, run_variance) * (1 / len(first) + 1 / len(second)))
            tests[key] = statistics.fmean(second) - statistics.fmean(first), error, freedom + extra_freedom
    p_values = {key: _p_value(*test) for key, test in tests.items()}
    alarmed = _hold_rate(p_values, false_alarms)
    changes = []
    for key, (first, second) in sides.items():
        difference = statistics.fmean(second) - statistics.fmean(first)
        low = high = smallest = None
        if key in tests:
            _, error, degrees = tests[key]
            half_width = _student_quantile(1 - false_alarms / 2, degrees) * error
            low, high = math.expm1(difference - half_width), math.expm1(difference + half_width)
            alarm_at = _student_quantile(1 - false_alarms / 2 / len(tests), degrees)
            smallest = math.expm1((alarm_at + _student_quantile(POWER, degrees)) * error)
        verdict = ChangeVerdict.UNKNOWN if key not in tests else ChangeVerdict.NONE
        if key in alarmed:
            verdict = ChangeVerdict.SLOWER if difference > 0 else ChangeVerdict.FASTER
        runs = (*before[key], *after[key])
        changes.append(
            CellChange(
                key,
                math.exp(statistics.fmean(first)),
                math.exp(statistics.fmean(second)),
                math.expm1(difference),
                low,
                high,
                smallest,
                p_values.get(key),
                verdict,
                (len(first), len(second)),
                sum(not run.stable for run in runs),
            )
        )
    return changes


def pool_variances(cells: Iterable[Sequence[float]]) -> float:
    """Return the variance between runs of a cell, relative and over all cells with several runs.

    0 with fewer than `_LEAST_CELLS` of these. ``cells``: latencies of each cell's runs.
    """
    repeated = [[math.log(latency_ms) for latency_ms in runs] for runs in cells if len(runs) > 1]
    if len(repeated) < _LEAST_CELLS:
        return 0.0
    squares = math.fsum(statistics.variance(logs) * (len(logs) - 1) for logs in repeated)
    return squares / sum(len(logs) - 1 for logs in repeated)


def predict_next_run(latencies_ms: Sequence[float], pooled_variance: float) -> tuple[float, float]:
    """Return the 90% interval of the latency of a further run of a cell, Student's prediction interval of the logs.

    ``latencies_ms``: of one or more runs; ``pooled_variance``: of `pool_variances`. The interval of a single run
    without a pooled variance is the run itself.
    """
    logs = [math.log(latency_ms) for latency_ms in latencies_ms]
    if len(logs) == 1 and not pooled_variance:
        return latencies_ms[0], latencies_ms[0]
    freedom = len(logs) - 1 + (_LEAST_CELLS if pooled_variance else 0)
    variance = statistics.variance(logs) if len(logs) > 1 else 0.0
    deviation = math.sqrt(max(variance, pooled_variance) * (1.0 + 1.0 / len(logs)))
    middle, half_width = statistics.fmean(logs), _student_quantile(0.95, freedom) * deviation
    return math.exp(middle - half_width), math.exp(middle + half_width)


def _logs(runs: Iterable[CellRun]) -> list[float]:
    return [math.log(run.latency_ms) for run in runs]


def _p_value(difference: float, error: float, freedom: float) -> float:
    from scipy.special import stdtr

    if error <= 0.0:
        return 1.0 if difference == 0.0 else 0.0
    return 2.0 * float(stdtr(freedom, -abs(difference) / error))


def _student_quantile(probability: float, freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def _pool_variance(first: Sequence[float], second: Sequence[float]) -> tuple[float, int]:
    """Return the variance within both sides of a cell, and its degrees of freedom."""
    freedom = len(first) + len(second) - 2
    squares = sum(sum((value - statistics.fmean(side)) ** 2 for value in side) for side in (first, second))
    return (squares / freedom if freedom else 0.0), freedom


def _hold_rate(p_values: Mapping[ComparedCell, float], rate: float) -> set[ComparedCell]:
    """Return the cells whose p-values Holm's procedure rejects, at an error rate over all cells."""
    rejected: set[ComparedCell] = set()
    for order, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if p_values[key] > rate / (len(p_values) - order):
            break
        rejected.add(key)
    return rejected


@dataclass(frozen=True, slots=True)
class RunSelection:
    """Runs of a database: all, those of a day or a range of days, or those with a value of a column.

    Written ``PATH``, ``PATH@2026-01-31``, ``PATH@2026-01-01..2026-01-31`` or ``PATH@driver=550.54``.
    """

    path: Path
    selector: str = ""

    @classmethod
    def parse(cls, text: str, default: Path) -> RunSelection:
        """Return the selection named by a text; without a path, a selection of ``default``."""
        if Path(text).exists() or "@" not in text:
            return cls(Path(text))
        path, _, selector = text.rpartition("@")
        return cls(Path(path) if path else default, selector)

    def __str__(self) -> str:
        return f"{self.path}@{self.selector}" if self.selector else str(self.path)

    def find_runs(self, database: KernelDb) -> set[str]:
        """Return the ids of the runs. Raises `InputError` for a selector that cannot be read or selects nothing."""
        runs = read_records(database, RunRow)
        key, equals, value = self.selector.partition("=")
        if not self.selector:
            selection = runs
        elif equals:
            if key not in _RUN_KEYS:
                raise unknown_name("column of runs", key, list(_RUN_KEYS))
            selection = [run for run in runs if str(getattr(run, key) or "").startswith(value)]
        else:
            begin, _, end = self.selector.partition("..")
            first, last = _read_day(begin), _read_day(end or begin)
            selection = [run for run in runs if first <= run.started_at.astimezone(UTC).date().isoformat() <= last]
        if not selection:
            days = sorted({run.started_at.astimezone(UTC).date().isoformat() for run in runs})
            content = f"it holds runs of {days[0]} to {days[-1]}" if days else "it holds no run"
            raise InputError(f"{self} selects no run: {content}", "PATH@DATE, PATH@DATE..DATE or PATH@COLUMN=VALUE")
        return {run.run_id for run in selection}


def _read_day(text: str) -> str:
    try:
        return datetime.fromisoformat(text).date().isoformat()
    except ValueError:
        raise InputError(f"cannot read the date {text!r}", "write it as 2026-01-31; columns as driver=550.54") from None


def read_cells(database: KernelDb, runs: set[str]) -> dict[ComparedCell, list[CellRun]]:
    """Return the measured cells of some runs of a database, each with its runs in their order."""
    cells: dict[ComparedCell, list[CellRun]] = defaultdict(list)
    for row in sorted(read_records(database, ModelRow), key=lambda row: row.run_id):
        latency_ms = row.latency_p50_ms or row.latency_mean_ms
        if row.run_id not in runs or not latency_ms:
            continue
        share = str(Share(row.sm_share_pct, row.mig_profile))
        key = ComparedCell(row.model, row.device, share, row.batch, row.processes, row.dims or "")
        error = 0.0
        if row.latency_std_ms and row.latency_mean_ms and row.repeats:
            error = row.latency_std_ms / row.latency_mean_ms / math.sqrt(row.repeats)
        cells[key].append(CellRun(latency_ms, error, row.stable is not False, row.run_id))
    return dict(cells)


def compare_ops(
    before: tuple[KernelDb, Iterable[str]], after: tuple[KernelDb, Iterable[str]], limit: int = 3
) -> list[OpChange]:
    """Return the kernels (without kernels, the ops) with the largest change in time between two sides of a cell.

    ``before``, ``after``: databases, and the cell's runs in them; ``limit``: length of the list.
    """
    sides = [_read_op_ms(database, set(runs)) for database, runs in (before, after)]
    if not all(sides):
        return []
    names = sides[0].keys() | sides[1].keys()
    changes = [OpChange(name, sides[0].get(name, 0.0), sides[1].get(name, 0.0)) for name in names]
    return sorted(changes, key=lambda op: (-abs(op.after_ms - op.before_ms), op.name))[:limit]


def _read_op_ms(database: KernelDb, runs: set[str]) -> dict[str, float]:
    """Return by name the milliseconds that kernels or ops take in a batch, the median over runs."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for query in (_KERNEL_MS, _OP_MS):
        for run_id, name, milliseconds in run_query(database, query).rows:
            if run_id in runs:
                times[name][run_id] = milliseconds
        if times:
            break
    measured = {run_id for by_run in times.values() for run_id in by_run}
    return {name: statistics.median(by_run.get(run_id, 0.0) for run_id in measured) for name, by_run in times.items()}
