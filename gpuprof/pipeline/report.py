"""Reports: measurements, predictions, maps, simulations and load tests as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuprof.domain.file_access import write_atomically
from gpuprof.domain.plural import count_of
from gpuprof.errors import InputError, refuse_unwritable
from gpuprof.pipeline.arguments import PathArgument, name_models
from gpuprof.pipeline.devices import open_existing
from gpuprof.pipeline.result import Result
from gpuprof.reporting.database import make_database_sections
from gpuprof.reporting.document import Section, page, read_json, sections_of


@dataclass(frozen=True, kw_only=True)
class ReportResult(Result):
    """A page.

    Attributes
    ----------
    sections : tuple of Section
        Sections of the page.
    """

    page: Path
    sections: tuple[Section, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each figure: its section and title."""
        return [
            {"section": section.title, "figure": chart.title} for section in self.sections for chart in section.charts
        ]


def report(sources: PathArgument | Sequence[PathArgument], output: PathArgument = "report.html") -> ReportResult:
    """Write one self-contained HTML page that opens from disk: interactive plots, in light and dark.

    Raises `InputError` when a source cannot be read, or a file cannot be written.

    Parameters
    ----------
    sources : path or sequence of path
        A database, maps, and JSON output of ``gpuprof compare``, ``simulate`` and ``load``.
    output : path
        The page.

    Examples
    --------
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> quick = gpuprof.ProfileSettings(time_limit_s=0.2)
    >>> found = gpuprof.profile([file], batches=(1,), shares=("100",), device="cpu", db="db", settings=quick)
    >>> drawn = gpuprof.report(["db"], "report.html")
    >>> drawn.page.read_text().count("<figure") == len(drawn.rows())
    True
    """
    target = Path(output)
    if target.suffix.lower() not in ("", ".html", ".htm"):
        raise InputError(f"a report is one HTML page but got {target.name}", "name it .html")
    paths = [Path(source) for source in name_models(sources)]
    if not paths:
        raise InputError("a report needs a source", "name a database, a map, or the --json output of a verb")
    sections = _read_sections(paths)
    with refuse_unwritable(target):
        write_atomically(target, page("gpuprof report", sections).encode())
    charts = sum(len(section.charts) for section in sections)
    note = f"wrote {target}: {count_of(charts, 'figure')} from {count_of(len(paths), 'source')}"
    return ReportResult(notes=(note,), page=target, sections=tuple(sections))


def _read_sections(sources: Sequence[Path]) -> list[Section]:
    all_sections: list[Section] = []
    for source in sources:
        if source.is_dir():
            database = open_existing(source)
            if not database.segments():
                raise InputError(f"the kernel database {source} holds no runs", "gpuprof profile fills one")
            all_sections += make_database_sections(database, source.name)
            continue
        titles = {section.title for section in all_sections}
        all_sections += (
            replace(section, title=f"{section.title}, {source.name}") if section.title in titles else section
            for section in sections_of(read_json(source), source.name)
        )
    return all_sections
