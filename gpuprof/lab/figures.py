"""The papers' figures, defined by tables in ``datasets/papers/figures.toml``, with further policies on request."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gpuprof.domain.catalogue import datasets
from gpuprof.errors import InputError, unknown_name
from gpuprof.lab.cells import LabCell, Record, parse_policy
from gpuprof.lab.suites import Scenario, list_scenarios
from gpuprof.placement.policies import Policy, describe_policy
from gpuprof.reporting.chart import Axis, Chart, Line, group_bars

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
        """``as printed``, within the range and to the printed digits, else ``differs``."""
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
    """A figure with its results.

    Attributes
    ----------
    name, title : str
    header : tuple of str
    rows : tuple of tuples as long as ``header``
        A row for each policy; None where the policy gives no number, for which a remark states the reason.
    numbers : tuple of PrintedNumber
    reasons : tuple of str
        Differences from the paper, with their reasons.
    remarks : tuple of str
        Policies that could not plan, with their reasons.
    chart : Chart
    """

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]
    numbers: tuple[PrintedNumber, ...]
    reasons: tuple[str, ...]
    remarks: tuple[str, ...]
    chart: Chart

    def row(self, policy: str) -> tuple[str | float | None, ...]:
        """Return the cells of a policy's row."""
        return next(row[1:] for row in self.rows if row[0] == policy)


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
        table = self.table
        measures, factors = dict(table["measures"]), table.get("factors", {})
        hidden = set(table.get("hidden", ()))
        shown = [column for column in self.columns if column not in hidden]
        heads = [
            (column, label, measures[label], float(factors.get(label, 1.0))) for column in shown for label in measures
        ]
        rows = tuple(
            (
                policy,
                *(_scale(read_field(records[policy, column], field), factor) for column, _, field, factor in heads),
            )
            for policy in self.policies
        )
        numbers = tuple(self._compare(fact, records, shown) for fact in table["facts"])
        first_label, first_field = next(iter(measures.items()))
        factor = float(factors.get(first_label, 1.0))
        drawn = {
            policy: [_number(_scale(read_field(records[policy, column], first_field), factor)) for column in shown]
            for policy in self.policies
        }
        return DrawnFigure(
            name=self.name,
            title=table["title"],
            header=("policy", *(_name_column(column, label, shown, measures) for column, label, *_ in heads)),
            rows=rows,
            numbers=numbers,
            reasons=tuple(table["why"]),
            remarks=tuple(dict.fromkeys(_list_remarks(records))),
            chart=self._make_chart(shown, drawn | self._printed_series(first_field, shown), first_label),
        )

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
        lines = []
        for color, (policy, values) in enumerate(series.items()):
            points = [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
            if points:
                lines.append(Line(policy, tuple(x for x, _ in points), tuple(y for _, y in points), color))
        label = {"gpus": "devices", "rate": "rate × ", "slo": "SLO × "}[self.table["vary"]]
        return Chart(title, Axis(label), Axis(unit, low=0.0), lines=tuple(lines))

    def _compare(
        self, fact: Mapping[str, Any], records: Mapping[tuple[str, str], Record], shown: Sequence[str]
    ) -> PrintedNumber:
        printed = fact["printed"]
        low, high = printed if isinstance(printed, list) else (printed, printed)
        default_label, default_field = next(iter(self.table["measures"].items()))
        field = fact.get("measure", default_field)
        by_field = {name: label for label, name in self.table["measures"].items()}
        factor = float(self.table.get("factors", {}).get(by_field.get(field, default_label), 1.0))

        def value(policy: str, column: str) -> float | None:
            return _number(_scale(read_field(records.get((policy, column), {}), field), factor))

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


def make_figure(name: str, data: Path | None, policies: Sequence[str | Policy] = ()) -> PaperFigure:
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


def _list_columns(table: Mapping[str, Any], data: Path | None) -> Iterator[tuple[str, Scenario]]:
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
    """Return a field of a record; ``shares.W4`` is an entry of a mapping."""
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


def _scale(value: str | float | None, factor: float) -> str | float | None:
    return value * factor if isinstance(value, int | float) and factor != 1.0 else value


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
