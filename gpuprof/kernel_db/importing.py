"""Brings published measurements into the database, each file once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from gpuprof.errors import InputError, unknown_name
from gpuprof.kernel_db.importers import aiconfigurator, igniter_profile, neusight
from gpuprof.kernel_db.importers.csv_tables import IGNITER, MODEL_ANALYZER, PARVAGPU, THESIS
from gpuprof.kernel_db.importers.source import Source
from gpuprof.kernel_db.store import KernelDb, Run


class Importer(Protocol):
    """Module or object that imports a file format."""

    def recognizes(self, source: Source) -> bool:
        """Return whether the file has this importer's format."""

    def read_runs(self, source: Source, device: str | None) -> Iterable[Run]:
        """Return the file's runs."""


#: Name of a form → its reader.
IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {
        "parvagpu": PARVAGPU,
        "thesis": THESIS,
        "igniter-csv": IGNITER,
        "igniter-profile": igniter_profile,
        "model-analyzer": MODEL_ANALYZER,
        "neusight": neusight,
        "aiconfigurator": aiconfigurator,
    }
)


@dataclass(frozen=True, slots=True)
class ImportOutcome:
    """Outcome of importing a file."""

    path: Path
    form: str  #: A key of `IMPORTERS`; empty for a file that was passed over.
    device: str  #: Device of the measurements; for a file with several devices their names, joined by ``", "``.
    #: Added to ``models``, ``colocations`` and ``ops``; 0: the file was there already, or is none of these forms.
    rows: int
    note: str = ""


def import_files(
    database: KernelDb, paths: Sequence[Path], device: str | None = None, form: str | None = None
) -> list[ImportOutcome]:
    """Import files, and in directories all files of a known format.

    All files are read before anything is written: a single bad file leaves the database unchanged. Raises `InputError`,
    with the line number, when a file cannot be read, has no known format, or is damaged. ``device``: device of the
    measurements where the files name none; by default the device of the publication; ``form``: a key of `IMPORTERS`; by
    default recognised from each file.
    """
    if form is not None and form not in IMPORTERS:
        raise unknown_name("form", form, sorted(IMPORTERS))
    imported_hashes = set(database.read_table("runs", ["source_sha256"]).column("source_sha256").to_pylist())
    outcomes: list[ImportOutcome] = []
    runs: list[Run] = []
    for path, optional in _files(paths):
        source = Source.read_file(path)
        name = form or next((name for name, reader in IMPORTERS.items() if reader.recognizes(source)), None)
        if name is None:
            if not optional:
                raise InputError(f"{path} has no form that is known", f"known: {', '.join(sorted(IMPORTERS))}")
            outcomes.append(ImportOutcome(path, "", "", 0, "passed over: no known form"))
        elif source.sha256 in imported_hashes:
            outcomes.append(ImportOutcome(path, name, "", 0, "there already"))
        else:
            new_runs = list(IMPORTERS[name].read_runs(source, device))
            rows = sum(len(run.models) + len(run.colocations) + len(run.ops) for run in new_runs)
            if not rows:
                if not optional:
                    raise InputError(
                        f"{path} has no row of the form {name}",
                        "fetch it again whole, or name its form before it",
                    )
                outcomes.append(ImportOutcome(path, name, "", 0, "passed over: no row"))
                continue
            runs += new_runs
            measured_on = ", ".join(dict.fromkeys(run.run.device for run in new_runs))
            outcomes.append(ImportOutcome(path, name, measured_on, rows))
    # Only now, when every file has been read.
    for run in runs:
        database.append(run)
    return outcomes


def split_form(words: Sequence[Path]) -> tuple[str | None, list[Path]]:
    """Return the format named by the first word (unless such a file exists), and the remaining words as files."""
    words = list(words)
    if words and str(words[0]) in IMPORTERS and not words[0].exists():
        return str(words[0]), words[1:]
    return None, words


def _files(paths: Sequence[Path]) -> Iterable[tuple[Path, bool]]:
    """Yield each file, and whether an unrecognised file may be skipped."""
    for path in paths:
        if path.is_dir():
            yield from (
                (file, True) for file in sorted(path.iterdir()) if file.suffix in (".csv", ".jsonl", ".parquet")
            )
        else:
            yield path, False
