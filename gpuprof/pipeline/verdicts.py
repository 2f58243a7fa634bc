"""Verdicts on objectives: kept or missed, model by model, and the reason; as records, Markdown or JUnit."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

from gpuprof.domain.file_access import write_atomically
from gpuprof.domain.plural import count_of
from gpuprof.domain.table import format_markdown, make_columns
from gpuprof.errors import InputError, SloMissedError, refuse_unwritable
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.result import Result

VERDICTS = make_columns(
    "model verdict:SLO in_time_pct latency_ms:p99_ms predicted_ms slo_ms rate_rps:sent/s goodput_rps"
)


@dataclass(frozen=True, slots=True)
class SloVerdict:
    """The verdict on a model's objective: ``percentile`` percent of its requests are answered within ``slo_ms``.

    ``kept`` is None where no judgement is possible: no objective, no request, or a closed loop, for which no map is
    planned. ``latency_ms`` and ``predicted_ms`` are 99th percentiles; None where absent.
    """

    model: str
    kept: bool | None
    slo_ms: float
    percentile: float
    in_time_pct: float | None
    latency_ms: float | None
    predicted_ms: float | None = None
    rate_rps: float = 0.0
    goodput_rps: float = 0.0
    reason: str = ""  #: One sentence: the reason of a missed objective, or a remark on the figures.

    @property
    def verdict(self) -> str:
        """The verdict as a word."""
        return "not judged" if self.kept is None else "kept" if self.kept else "missed"

    def record(self) -> dict[str, object]:
        """Return the fields and the word by name."""
        return {**asdict(self), "verdict": self.verdict}


def keeps_objective(in_time: int, requests: int, slo_ms: float, percentile: float) -> bool | None:
    """Return whether enough requests met the objective; None without requests or an objective."""
    if not requests or not math.isfinite(slo_ms):
        return None
    return 100.0 * in_time >= percentile * requests


class JudgedResult(Result):
    """A result with a verdict on each model's objective."""

    verb: ClassVar[str]  #: Name in a JUnit report.

    @abstractmethod
    def verdicts(self) -> tuple[SloVerdict, ...]:
        """Return the verdict on each model's objective, with the reason of a missed one."""

    @abstractmethod
    def document(self) -> object:
        """Return everything as plain values for JSON."""

    def require_kept(self) -> None:
        """Check that every model with an objective kept it.

        Raises `SloMissedError` when a model missed its objective.
        """
        judged = [verdict for verdict in self.verdicts() if verdict.kept is not None]
        if missed := [verdict.model for verdict in judged if not verdict.kept]:
            raise SloMissedError(
                f"{len(missed)} of {count_of(len(judged), 'model')} missed the SLO: {', '.join(missed)}",
                "--no-fail ends with exit code 0 all the same",
            )

    def write(self, path: PathArgument) -> None:
        """Write everything as .json, for ``gpuprof report`` too, or the verdicts as Markdown (.md) or JUnit (.xml).

        Raises `InputError` when the name says no format, or the file cannot be written.
        """
        target = check_output(Path(path))
        if target.suffix == ".json":
            text = f"{json.dumps(replace_non_finite(self.document()), indent=1)}\n"
        else:
            verdicts, is_table = self.verdicts(), target.suffix == ".md"
            text = format_verdicts(verdicts) if is_table else format_junit(verdicts, self.verb)
        with refuse_unwritable(target):
            write_atomically(target, text.encode())


_SUFFIXES = (".json", ".md", ".xml")


def check_output(path: Path) -> Path:
    """Return the path of a file to write. Raises `InputError` when its name has no known format."""
    if path.suffix not in _SUFFIXES:
        raise InputError(f"cannot tell the format of {path}", f"let its name end in one of {', '.join(_SUFFIXES)}")
    return path


def replace_non_finite(value: object) -> object:
    """Return plain values with None in place of NaN and infinities, which JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return value


def format_verdicts(verdicts: Sequence[SloVerdict]) -> str:
    """Return the verdicts as a Markdown table with a line per model."""
    columns = (*VERDICTS, *make_columns("percentile:of_% reason"))
    return format_markdown([verdict.record() for verdict in verdicts], columns)


def format_junit(verdicts: Sequence[SloVerdict], verb: str) -> str:
    """Return the verdicts as a JUnit report: a test case per model, a failure per missed objective."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"gpuprof {verb}",
        tests=str(len(verdicts)),
        failures=str(sum(verdict.kept is False for verdict in verdicts)),
        errors="0",
        skipped=str(sum(verdict.kept is None for verdict in verdicts)),
    )
    for verdict in verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname=f"gpuprof.{verb}", name=verdict.model)
        if verdict.kept is None:
            ElementTree.SubElement(case, "skipped", message=verdict.reason or verdict.verdict)
        elif not verdict.kept:
            failure = ElementTree.SubElement(case, "failure", type="SloMissed", message=verdict.reason)
            failure.text = ", ".join(f"{key}={value}" for key, value in verdict.record().items() if key != "reason")
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"
