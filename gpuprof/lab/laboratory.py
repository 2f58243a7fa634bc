"""``lab``: suites and sweeps over any policies and estimators, and the papers' figures, as results and as one page."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from gpuprof.domain.estimate import Estimator
from gpuprof.domain.file_access import write_atomically
from gpuprof.domain.number_format import number_formatter
from gpuprof.errors import InputError, refuse_unwritable
from gpuprof.lab.cells import LabCell, Record, run_cells
from gpuprof.lab.figures import DrawnFigure, make_figure, select_figures
from gpuprof.lab.suites import Scenario, list_scenarios
from gpuprof.pipeline.arguments import PathArgument, optional_path
from gpuprof.pipeline.result import Progress, ProgressCallback, Result, say_nothing
from gpuprof.placement.policies import Policy
from gpuprof.reporting.chart import Axis, Chart, Line, group_bars
from gpuprof.reporting.document import Section, Table, page

#: Environment variable for the folder of published data.
DATA_VARIABLE = "GPUPROF_LAB_DATA"
#: Columns of `LabResult.rows`: numbers and short texts of each record.
COLUMNS = (
    "suite", "scenario", "policy", "estimator", "database", "gpus_allowed", "rate", "slo", "gpus_varied", "seed",
    "rate_rps", "gpus", "cost_per_hour", "planned_rps", "missing_rps", "goodput_rps", "in_time_pct", "late_count",
    "late", "slack_pct", "fragmentation_pct", "lower_bound_gpus", "broken_rules", "milliseconds", "sources", "reason",
)  # fmt: skip
_SPREAD_POINTS = 5
_VARIED = ("rate", "slo", "gpus")


@dataclass(frozen=True, slots=True)
class LabSettings:
    """Storage and execution of an experiment.

    Attributes
    ----------
    work : path
        Folder for databases and ``results.jsonl``; a later run with the same cells resumes there.
    data : path or None
        Folder of published data; None: ``GPUPROF_LAB_DATA``.
    jobs : int
        Number of worker processes.
    time_limit_s : float or None
        Longest search of a policy; None: the scenario's.
    """

    work: PathArgument = "lab"
    data: PathArgument | None = None
    jobs: int = 2
    time_limit_s: float | None = None

    def data_folder(self) -> Path | None:
        """Return the folder of published data, None where none is named."""
        return optional_path(self.data or os.environ.get(DATA_VARIABLE) or None)


@dataclass(frozen=True, kw_only=True)
class LabResult(Result):
    """Outcome of each scenario by each policy.

    Attributes
    ----------
    records : tuple of dict
        The record of each cell, as in ``results.jsonl``.
    """

    records: tuple[Record, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each cell: scenario, policy, conditions, and its figures."""
        return [{name: record.get(name) for name in COLUMNS} for record in self.records]

    def sections(self) -> list[Section]:
        """Return a section for each suite: GPUs and goodput by policy, and every figure in a table."""
        return [
            _make_suite_section(suite, [record for record in self.records if record["suite"] == suite])
            for suite in dict.fromkeys(record["suite"] for record in self.records)
        ]


@dataclass(frozen=True, kw_only=True)
class FigureResult(Result):
    """Figures of the papers with the requested policies."""

    figures: tuple[DrawnFigure, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each printed number: the printed value, our value, and the verdict."""
        return [{"figure": figure.name, **number.row()} for figure in self.figures for number in figure.numbers]

    def sections(self) -> list[Section]:
        """Return two sections for each figure: its chart and table, and its printed numbers."""
        return [section for figure in self.figures for section in _make_figure_sections(figure)]


def run(
    suites: Sequence[str],
    policies: Sequence[str | Policy],
    *,
    estimators: Sequence[str | Estimator] = (),
    vary: Sequence[str] = (),
    seeds: int = 1,
    settings: LabSettings = LabSettings(),
    progress: ProgressCallback = say_nothing,
) -> LabResult:
    """Run every scenario of the suites by every policy, and simulate the maps.

    Parameters
    ----------
    suites : sequence of str
        ``parvagpu``, ``igniter``, ``thesis``, ``usher``, ``parvagpux10`` for ten times the services, a scenario such as
        ``thesis/vision``, or a folder with slo.csv files, fleets as .toml and ``gpuprof-db``.
    policies : sequence of str or Policy
        By name, with options as ``usher+creq=wao``, ``module:Class``, or objects, which run one after another.
    estimators : sequence of str or Estimator
        Estimators of the policies, as these; empty: the scenario's own, which always gives the times of simulated
        batches.
    vary : sequence of str
        ``rate=0.5..2`` (five values), ``slo=0.8,1,1.2``, ``gpus=1..6``: each scenario under each combination.
    seeds : int
        Seeds 0, 1, …, of policies and simulated requests.
    settings : LabSettings
    progress : callable, optional

    Raises
    ------
    InputError
        For an unknown suite, policy or estimator, or missing published data.

    Examples
    --------
    >>> import tempfile
    >>> done = run(["thesis/example1"], ["ffd", "usher"], settings=LabSettings(tempfile.mkdtemp(), jobs=1))
    >>> done.to_frame()[["scenario", "policy", "gpus"]].to_dict("list")
    {'scenario': ['example1', 'example1'], 'policy': ['ffd', 'usher'], 'gpus': [4, 4]}
    """
    data = settings.data_folder()
    scenarios = [scenario for suite in suites for scenario in list_scenarios(suite, data)]
    if not scenarios or not policies:
        raise InputError("an experiment needs a suite and a policy", "name some, as in lab run thesis --policy optimal")
    cells = [
        LabCell(changed, policy, estimator, seed, settings.time_limit_s, varied=varied)
        for scenario in scenarios
        for changed, varied in _vary(scenario, vary)
        for policy in policies
        for estimator in estimators or (None,)
        for seed in range(seeds)
    ]
    return LabResult(records=tuple(run_cells(cells, Path(settings.work), data, settings.jobs, _relay(progress))))


def draw(
    names: Sequence[str],
    policies: Sequence[str | Policy] = (),
    *,
    settings: LabSettings = LabSettings(),
    progress: ProgressCallback = say_nothing,
) -> FigureResult:
    """Run figures of the papers, with further policies in them.

    ``names``: of figures (``parvagpu-8``), or of papers (``thesis``: all its figures); ``policies``: as `run` takes
    them, beside the figure's own. Raises `InputError` as `run` does.
    """
    data = settings.data_folder()
    figures = [make_figure(name, data, policies) for name in select_figures(names)]
    cells = [figure.cells(settings.time_limit_s) for figure in figures]
    flat = [cell for by_label in cells for cell in by_label.values()]
    records = iter(run_cells(flat, Path(settings.work), data, settings.jobs, _relay(progress)))
    results = [
        figure.draw({key: next(records) for key in by_label}) for figure, by_label in zip(figures, cells, strict=True)
    ]
    return FigureResult(figures=tuple(results))


def write_page(path: PathArgument, *results: LabResult | FigureResult) -> Path:
    """Write one HTML page with the tables and charts of the results.

    Raises `InputError` when the page cannot be written.
    """
    target = Path(path)
    text = page("gpuprof lab", [section for result in results for section in result.sections()])
    with refuse_unwritable(target):
        write_atomically(target, text.encode("utf-8"))
    return target


def _relay(progress: ProgressCallback) -> Callable[[str, int, int], None]:
    return lambda step, done, total: progress(Progress(step, done, total))


def parse_values(text: str) -> tuple[str, list[str]]:
    """Return the name and values of a text such as ``rate=0.5..2``: a list, or ``low..high`` with ``:count`` values.

    Raises `InputError` for other texts.

    Examples
    --------
    >>> parse_values("rate=0.5..2"), parse_values("gpus=1..3"), parse_values("slo=1,1.5")
    (('rate', ['0.5', '0.875', '1.25', '1.625', '2']), ('gpus', ['1', '2', '3']), ('slo', ['1', '1.5']))
    """
    name, _, listing = text.partition("=")
    span = re.fullmatch(r"([\d.]+)\.\.([\d.]+)(?::(\d+))?", listing)
    try:
        if name not in _VARIED or not listing or (span is None and ".." in listing):
            raise ValueError
        if span is None:
            values = [value.strip() for value in listing.split(",")]
            if name != "gpus":
                values = [f"{float(value):g}" for value in values]
        elif name == "gpus":
            values = [str(count) for count in range(int(span[1]), int(span[2]) + 1)]
        else:
            low, high, count = float(span[1]), float(span[2]), int(span[3] or _SPREAD_POINTS)
            values = [f"{low + (high - low) * i / max(1, count - 1):g}" for i in range(count)]
        if name != "gpus" and not all(float(value) > 0 for value in values):
            raise ValueError
    except ValueError:
        raise InputError(f"cannot read --vary {text!r}", "write rate=0.5..2, slo=0.8,1,1.2 or gpus=1..6") from None
    return name, values


def _vary(scenario: Scenario, vary: Sequence[str]) -> list[tuple[Scenario, tuple[tuple[str, str], ...]]]:
    axes = [parse_values(text) for text in vary]
    scenarios = []
    for values in product(*(values for _, values in axes)):
        factors = {name: value for (name, _), value in zip(axes, values, strict=True)}
        if any(value.isdigit() for name, value in factors.items() if name == "gpus") and not scenario.gpus:
            raise InputError(f"{scenario.title} names no devices, whose count could vary", "give it a fleet as .toml")
        point = scenario.vary(float(factors.get("rate", 1)), float(factors.get("slo", 1)), factors.get("gpus"))
        names = {"gpus": "gpus_varied"}
        scenarios.append((point, tuple((names.get(name, name), value) for name, value in factors.items())))
    return scenarios


def _label(record: Record) -> str:
    varied = [f"{name} {record[name]}" for name in ("rate", "slo", "gpus_varied") if record.get(name) is not None]
    return ", ".join([record["scenario"], *varied])


def _make_suite_section(suite: str, records: Sequence[Record]) -> Section:
    groups = tuple(dict.fromkeys(map(_label, records)))
    dimensions = [name for name in ("rate", "slo", "gpus_varied") if len({row.get(name) for row in records}) > 1]
    charts = []
    for field, unit in (("gpus", "devices"), ("goodput_rps", "goodput simulated (requests/s)")):
        by_policy: dict[str, dict[str, float | None]] = {}
        for record in records:
            by_policy.setdefault(_series(record, records), {}).setdefault(_label(record), record.get(field))
        if not any(value is not None for values in by_policy.values() for value in values.values()):
            continue
        if len(dimensions) == 1 and len({row["scenario"] for row in records}) == 1:
            charts.append(_draw_sweep(f"{suite}: {unit}", dimensions[0], unit, records, field))
        else:
            series = {name: [values.get(group) for group in groups] for name, values in by_policy.items()}
            bars = group_bars(groups, series, unit)
            charts.append(Chart(f"{suite}: {unit}", Axis("scenario", names=groups), Axis(unit), boxes=bars))
    rows = [{name: record.get(name) for name in COLUMNS} for record in records]
    shown = [name for name in COLUMNS if any(row[name] not in (None, "") for row in rows)]
    table = Table(tuple(shown), tuple(tuple(_text(row[name]) for name in shown) for row in rows))
    text = f"{len(records)} cells; goodput and lateness are simulated, devices and cost are those of the maps."
    return Section(suite, text, tuple(charts), table, "simulated")


def _series(record: Record, records: Sequence[Record]) -> str:
    has_alternatives = len({row["estimator"] for row in records if row["policy"] == record["policy"]}) > 1
    return f"{record['policy']}, {record['estimator']}" if has_alternatives else str(record["policy"])


def _draw_sweep(title: str, axis: str, unit: str, records: Sequence[Record], field: str) -> Chart:
    series: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.get(field) is not None:
            series.setdefault(_series(record, records), []).append((float(record[axis]), record[field]))
    lines = tuple(
        Line(name, tuple(x for x, _ in sorted(points)), tuple(y for _, y in sorted(points)), color)
        for color, (name, points) in enumerate(series.items())
    )
    return Chart(title, Axis(axis.removesuffix("_varied")), Axis(unit, low=0.0), lines=lines)


def _make_figure_sections(figure: DrawnFigure) -> list[Section]:
    table = Table(figure.header, tuple(tuple(map(_text, row)) for row in figure.rows))
    sections = [Section(figure.title, " ".join(figure.remarks), (figure.chart,), table, figure.name)]
    if figure.numbers:
        numbers = [number.row() for number in figure.numbers]
        printed = Table(tuple(numbers[0]), tuple(tuple(map(_text, row.values())) for row in numbers))
        text = " ".join(figure.reasons)
        sections.append(Section(f"{figure.title.partition(':')[0]}: printed numbers", text, (), printed, figure.name))
    return sections


_FORMAT = number_formatter(4)


def _text(value: object) -> str:
    if value is None:
        return "–"
    return _FORMAT(value) if isinstance(value, float) else str(value)
