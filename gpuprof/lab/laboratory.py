"""``lab``: suites and sweeps over any policies and estimators, and the papers' figures, as results and as one page."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.file_access import write_atomically
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.validation import Count, Positive
from gpuprof.errors import InputError, refuse_unwritable, unknown_name
from gpuprof.lab.cells import LabCell, Record, parse_policy, read_records, run_cells
from gpuprof.lab.scenarios import Scenario, list_scenarios
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.result import Progress, ProgressCallback, Result, say_nothing
from gpuprof.pipeline.settings import Settings, option
from gpuprof.placement.policies import Policy, describe_policy
from gpuprof.reporting.chart import Axis, Chart, group_bars, join_points
from gpuprof.reporting.document import Section, Table, make_table, page

#: Part of the arriving requests that counts as near-optimal (thesis §6.2.2).
_NEAR_OPTIMAL = 0.9


@dataclass(frozen=True, slots=True)
class PrintedNumber:
    """A number printed in a paper, with our result."""

    what: str
    where: str  #: Section, figure or table.
    printed: tuple[float, float]  #: Ends of the printed range; equal for a single number.
    ours: float | None  #: Our result; None: no policy here gives this number.
    digits: int  #: Digits after the point in the paper.

    @property
    def verdict(self) -> str:
        """Return ``as printed`` if the result has the printed digits or is in the printed range, else ``differs``."""
        low, high = self.printed
        half = 0.5 * 10.0**-self.digits * (1.0 + 1e-9)
        agrees = self.ours is not None and low - half <= self.ours <= high + half
        return "as printed" if agrees else "differs"

    def row(self) -> dict[str, object]:
        """Return the number as texts with the printed digits, and the verdict."""
        low, high = self.printed
        text = f"{low:.{self.digits}f}" if low == high else f"{low:.{self.digits}f}…{high:.{self.digits}f}"
        if high == math.inf:
            text = f"at least {low:.{self.digits}f}"
        ours = None if self.ours is None else f"{self.ours:.{self.digits}f}"
        return {"number": self.what, "where": self.where, "printed": text, "here": ours, "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class DrawnFigure:
    """A figure with its results."""

    name: str
    title: str
    header: tuple[str, ...]
    #: A row for each policy; None where the policy gives no number, for which a remark states the reason.
    rows: tuple[tuple[str | float | None, ...], ...]
    numbers: tuple[PrintedNumber, ...]
    reasons: tuple[str, ...]  #: Differences from the paper, with their reasons.
    remarks: tuple[str, ...]  #: Policies that could not plan, with their reasons.
    chart: Chart


@cache
def _read_tables() -> Mapping[str, dict[str, Any]]:
    return tomllib.loads((datasets() / "papers" / "figures.toml").read_text(encoding="utf-8"))


def figure_titles() -> dict[str, str]:
    """Return the title of each figure by its name."""
    return {name: table["title"] for name, table in _read_tables().items()}


def select_figures(names: Sequence[str]) -> list[str]:
    """Return the figures called by their names, by a paper's name (``thesis``) or by a figure's beginning.

    Raises `InputError` for a name that fits none.
    """
    selection: list[str] = []
    for name in names:
        fitting = [figure for figure in _read_tables() if figure == name] or [
            figure for figure in _read_tables() if figure.startswith(f"{name}-")
        ]
        if not fitting:
            raise unknown_name("figure", name, list(_read_tables()))
        selection += fitting
    return list(dict.fromkeys(selection))


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure to be run: its table, its policies and its columns."""

    name: str
    table: Mapping[str, Any]
    policies: Mapping[str, str | Policy]  #: Label → policy.
    columns: Mapping[str, Scenario]  #: Label → scenario; scenarios for printed numbers alone come last.

    def cells(self, limit_s: float | None = None) -> dict[tuple[str, str], LabCell]:
        """Return the cell of each policy in each column, by their labels."""
        repeats = int(self.table.get("repeats", 1))
        return {
            (policy, column): LabCell(scenario, spec, limit_s=limit_s, repeats=repeats)
            for policy, spec in self.policies.items()
            for column, scenario in self.columns.items()
        }

    def draw(self, records: Mapping[tuple[str, str], Record]) -> DrawnFigure:
        """Return the figure with the records of its cells."""
        table, measures = self.table, dict(self.table["measures"])
        hidden = set(table.get("hidden", ()))
        shown = [column for column in self.columns if column not in hidden]
        heads = [(column, label) for column in shown for label in measures]
        rows = tuple(
            (policy, *(self._read(records[policy, column], measures[label]) for column, label in heads))
            for policy in self.policies
        )
        numbers = tuple(self._compare(fact, records, shown) for fact in table["facts"])
        first_label, first_field = next(iter(measures.items()))
        drawn = {
            policy: [_number(self._read(records[policy, column], first_field)) for column in shown]
            for policy in self.policies
        }
        return DrawnFigure(
            name=self.name,
            title=table["title"],
            header=("policy", *(_name_column(*head, shown, measures) for head in heads)),
            rows=rows,
            numbers=numbers,
            reasons=tuple(table["why"]),
            remarks=tuple(dict.fromkeys(_list_remarks(records))),
            chart=self._make_chart(shown, drawn | self._printed_series(first_field, shown), first_label),
        )

    def _read(self, record: Record, field: str) -> str | float | None:
        """Return a field of a record, times the factor of its measure; of the first measure for other fields."""
        labels = {name: label for label, name in reversed(self.table["measures"].items())}
        label = labels.get(field, next(iter(self.table["measures"])))
        value, factor = read_field(record, field), float(self.table.get("factors", {}).get(label, 1.0))
        return value * factor if isinstance(value, int | float) and factor != 1.0 else value

    def _printed_series(self, field: str, shown: Sequence[str]) -> dict[str, list[float | None]]:
        """Return the printed values of the drawn measure by policy, from single cells only."""
        series: dict[str, list[float | None]] = {}
        for fact in self.table["facts"]:
            column = fact.get("at")
            is_cell = "how" not in fact and column in shown and fact.get("measure", field) == field
            if is_cell and not isinstance(fact["printed"], list):
                values = series.setdefault(f"{fact['of']}, printed", [None] * len(shown))
                values[shown.index(column)] = float(fact["printed"])
        return series

    def _make_chart(self, shown: Sequence[str], series: Mapping[str, list[float | None]], unit: str) -> Chart:
        title = self.table["title"].partition(":")[0]
        if "vary" not in self.table or not all(_is_number(value) for value in self.table["values"]):
            bars = group_bars(shown, series, unit)
            return Chart(title, Axis("scenario", names=tuple(shown)), Axis(unit), boxes=bars)
        xs = [float(value) for value in self.table["values"]]
        points = {
            policy: [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
            for policy, values in series.items()
        }
        lines = join_points({policy: pairs for policy, pairs in points.items() if pairs})
        label = {"gpus": "devices", "rate": "rate × ", "slo": "SLO × "}[self.table["vary"]]
        return Chart(title, Axis(label), Axis(unit, low=0.0), lines=lines)

    def _compare(
        self, fact: Mapping[str, Any], records: Mapping[tuple[str, str], Record], shown: Sequence[str]
    ) -> PrintedNumber:
        printed = fact["printed"]
        low, high = printed if isinstance(printed, list) else (printed, printed)
        field = fact.get("measure", next(iter(self.table["measures"].values())))

        def value(policy: str, column: str) -> float | None:
            return _number(self._read(records.get((policy, column), {}), field))

        at = fact.get("at", list(shown))
        columns = [at] if isinstance(at, str) else at
        values = [value(fact["of"], column) for column in columns]
        if fact.get("how") == "first_near":
            near = (
                column
                for column in columns
                if (goodput_rps := value(fact["of"], column)) is not None
                and goodput_rps >= _NEAR_OPTIMAL * records[fact["of"], column]["arriving_rps"]
            )
            ours = _number(next((float(column) for column in near if _is_number(column)), None))
        else:
            baseline = [value(fact["over"], column) for column in columns] if "over" in fact else []
            ours = _COMPARISONS[fact.get("how", "mean")](values, baseline)
        return PrintedNumber(fact["what"], fact["where"], (low, high), ours, int(fact.get("digits", 0)))


def make_figure(name: str, data: Path, policies: Sequence[str | Policy] = ()) -> PaperFigure:
    """Return the figure of a name, with ``policies`` in addition to the paper's.

    Baselines that are not installed, because only the repository contains them, are omitted. Raises `InputError` for an
    unknown name, or missing data.
    """
    tables = _read_tables()
    if name not in tables:
        raise unknown_name("figure", name, list(tables))
    table = tables[name]
    labels = {label: policy for label, policy in table["policies"].items() if _is_installed(policy)} | {
        describe_policy(policy): policy for policy in policies if policy not in table["policies"].values()
    }
    return PaperFigure(name, table, labels, dict(_list_columns(table, data)))


def _is_installed(policy: str) -> bool:
    try:
        parse_policy(policy)
    except InputError:
        return False
    return True


def _list_columns(table: Mapping[str, Any], data: Path) -> Iterator[tuple[str, Scenario]]:
    rate, slo, gpus = float(table.get("rate", 1.0)), float(table.get("slo", 1.0)), table.get("gpus")
    is_simulated = table.get("simulate", True)

    def change(scenario: Scenario) -> Scenario:
        return scenario if is_simulated else replace(scenario, traffic=None)

    for title in table.get("scenarios", ()):
        (scenario,) = list_scenarios(title, data)
        yield scenario.name, change(scenario.vary(rate, slo, gpus))
    if "scenario" in table:
        (base,) = list_scenarios(table["scenario"], data)
        for value, label in zip(table["values"], table.get("labels", table["values"]), strict=True):
            variation = {"rate": rate, "slo": slo, "gpus": gpus}
            if table["vary"] == "gpus":
                variation["gpus"] = value
            else:
                variation[table["vary"]] = float(variation[table["vary"]] or 1.0) * float(value)
            yield label, change(base.vary(**variation))  # type: ignore[arg-type]  # each is of its parameter's type
        for label, kinds in table.get("hidden", {}).items():
            yield label, change(base.vary(rate, slo, kinds))


def read_field(record: Record, field: str) -> str | float | None:
    """Return a field of a record; ``shares.W4`` is the entry ``W4`` of the mapping ``shares``."""
    value: Any = record
    for part in field.split(".", 1):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str | float | int) else None


def _name_column(column: str, label: str, shown: Sequence[str], measures: Mapping[str, str]) -> str:
    if len(measures) == 1:
        return column
    return label if len(shown) == 1 else f"{column} {label}"


def _list_remarks(records: Mapping[tuple[str, str], Record]) -> Iterator[str]:
    for (policy, _), record in records.items():
        if record.get("reason"):
            yield f"{policy}, {record['scenario']}: {record['reason']}"
        if record.get("broken_rules") and "aware=false" not in record["policy"]:
            yield f"{policy}, {record['scenario']}: NOT SOUND, {record['broken_rules']} rules of the check are broken"


def _is_number(text: object) -> bool:
    try:
        float(str(text))
    except ValueError:
        return False
    return True


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


_Values = Sequence[float | None]


def _mean(values: _Values) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _mean_of_pairs(values: _Values, baseline: _Values, combine: Any) -> float | None:
    return _mean([combine(a, b) for a, b in zip(values, baseline, strict=True) if a and b])


#: ``how`` of a printed number → function of the values of its policy, and of the policy ``over`` which it is compared.
_COMPARISONS: Mapping[str, Any] = {
    "mean": lambda values, baseline: _mean(values),
    "fewer_pct": lambda values, baseline: _mean_of_pairs(values, baseline, lambda a, b: 100.0 * (1.0 - a / b)),
    "times_fewer": lambda values, baseline: _mean_of_pairs(values, baseline, lambda a, b: b / a),
    "times_more": lambda values, baseline: _mean_of_pairs(values, baseline, lambda a, b: a / b),
    "points": lambda values, baseline: _mean(
        [a - b for a, b in zip(values, baseline, strict=True) if a is not None and b is not None]
    ),
    "rises": lambda values, baseline: None if None in values else float(values[1] > values[0]),
    "falls": lambda values, baseline: None if None in values else float(values[1] < values[0]),
}


_FORMAT = NumberFormat(4)
#: Columns of `LabResult.rows`: numbers and short texts of each record.
COLUMNS = (
    "suite", "scenario", "policy", "estimator", "database", "gpus_allowed", "rate", "slo", "gpus_varied", "seed",
    "rate_rps", "gpus", "cost_per_hour", "planned_rps", "missing_rps", "goodput_rps", "in_time_pct", "late_count",
    "late", "slack_pct", "fragmentation_pct", "lower_bound_gpus", "broken_rules", "milliseconds", "sources", "reason",
)  # fmt: skip
_SPREAD_POINTS = 5
_VARIED = ("rate", "slo", "gpus")


class LabSettings(Settings):
    """Storage and execution of an experiment."""

    title: ClassVar[str] = "Experiment"

    work: Path = option(Path("lab"), "Folder of databases and results, at which a later run of the same cells resumes.")
    data: Path | None = option(
        None,
        "Folder of the papers' measurements, fetched unless they are there; default: published in --work.",
        envvar="GPUPROF_LAB_DATA",
    )
    jobs: Count = option(2, "Processes that run at once.")
    time_limit_s: Positive | None = option(
        None, "Longest search of a policy; default: the scenario's, mostly 5s.", "--time-limit", unit="s"
    )

    def data_folder(self) -> Path:
        """Return the folder of published data."""
        return self.data or Path(os.environ.get("GPUPROF_LAB_DATA") or self.work / "published")


@dataclass(frozen=True, kw_only=True)
class LabResult(Result):
    """Outcome of each scenario by each policy."""

    records: tuple[Record, ...]  #: The record of each cell, as in ``results.jsonl``.
    #: Figures of the suites' papers, by those policies whose cells have all been run.
    figures: tuple[DrawnFigure, ...] = ()

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each cell: scenario, policy, conditions, and its figures."""
        return [{name: record.get(name) for name in COLUMNS} for record in self.records]

    def sections(self) -> list[Section]:
        """Return a section for each suite, with GPUs and goodput by policy, and those of the papers' figures."""
        sections = [
            _make_suite_section(suite, [record for record in self.records if record["suite"] == suite])
            for suite in dict.fromkeys(record["suite"] for record in self.records)
        ]
        return sections + [section for figure in self.figures for section in _make_figure_sections(figure)]


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
    settings: LabSettings = LabSettings(),  # noqa: B008 - frozen
    progress: ProgressCallback = say_nothing,
) -> LabResult:
    """Run every scenario of the suites by every policy, and simulate the maps.

    Raises `InputError` for an unknown suite, policy or estimator, or missing published data.

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

    Examples
    --------
    >>> import tempfile
    >>> done = run(["thesis/example1"], ["ffd", "usher"], settings=LabSettings(work=tempfile.mkdtemp(), jobs=1))
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
    records = run_cells(cells, settings.work, data, settings.jobs, _relay(progress))
    return LabResult(records=tuple(records), figures=tuple(_draw_completed(suites, policies, settings)))


def _draw_completed(
    suites: Sequence[str], policies: Sequence[str | Policy], settings: LabSettings
) -> Iterator[DrawnFigure]:
    """Yield the papers' figures with the policies for which all cells are among the results."""
    done = read_records(settings.work / "results.jsonl")
    papers = {name.partition("-")[0] for name in figure_titles()}
    for name in select_figures([suite for suite in suites if suite in papers]):
        figure = make_figure(name, settings.data_folder(), policies)
        cells = {label: cell for label, cell in figure.cells(settings.time_limit_s).items() if cell.key in done}
        completed = {
            policy: spec
            for policy, spec in figure.policies.items()
            if all((policy, column) in cells for column in figure.columns)
        }
        if completed:
            records = {label: done[cell.key] for label, cell in cells.items() if label[0] in completed}
            drawn = replace(figure, policies=completed).draw(records)
            yield replace(drawn, numbers=tuple(number for number in drawn.numbers if number.ours is not None))


def draw(
    names: Sequence[str],
    policies: Sequence[str | Policy] = (),
    *,
    settings: LabSettings = LabSettings(),  # noqa: B008 - frozen
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
    records = iter(run_cells(flat, settings.work, data, settings.jobs, _relay(progress)))
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
    shown = [name for name in COLUMNS if any(record.get(name) not in (None, "") for record in records)]
    table = make_table(records, " ".join(shown))
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
    lines = join_points({name: sorted(points) for name, points in series.items()})
    return Chart(title, Axis(axis.removesuffix("_varied")), Axis(unit, low=0.0), lines=lines)


def _make_figure_sections(figure: DrawnFigure) -> list[Section]:
    table = Table(figure.header, tuple(tuple(map(_FORMAT, row)) for row in figure.rows))
    sections = [Section(figure.title, " ".join(figure.remarks), (figure.chart,), table, figure.name)]
    if figure.numbers:
        numbers = [number.row() for number in figure.numbers]
        printed = Table(tuple(numbers[0]), tuple(tuple(map(_FORMAT, row.values())) for row in numbers))
        text = " ".join(figure.reasons)
        sections.append(Section(f"{figure.title.partition(':')[0]}: printed numbers", text, (), printed, figure.name))
    return sections
