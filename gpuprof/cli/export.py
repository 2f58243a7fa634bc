"""Verbs that write files: ``export``, a map for another tool, and ``report``, one HTML page of all results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Self

import typer
from pydantic import model_validator

import gpuprof
from gpuprof.cli.options import MapFileArgument, check_output_folder, output_option
from gpuprof.cli.output import say_note
from gpuprof.domain.plural import count_of
from gpuprof.errors import InputError
from gpuprof.export.targets import check_target
from gpuprof.pipeline.settings import Settings, option


class ExportOptions(Settings):
    """Tool to write for, and the folder."""

    to: str | None = option(
        None,
        "Tool to write for: json, mig-parted, mps, triton, k8s, k8s-dra, k8s-kai, k8s-hami, kserve, ray-serve, envoy; "
        "default: mig-parted for a map with MIG instances, else triton.",
    )
    output: Path | None = option(
        None,
        "Directory to write to; default: a single file is printed, several go to export-TOOL.",
        "-o",
        "--output",
        output="folder",
    )
    image: str | None = option(None, "Container image with gpuprof, for Kubernetes and KServe.")
    allow_changed: bool = option(False, "Export model files that changed since the map was planned.")

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.to is not None:
            check_target(self.to, self.image)
        return self


def export(options: ExportOptions, map_file: MapFileArgument = Path("map.json")) -> None:
    """Write what another tool needs to run a map."""
    result = gpuprof.export(
        map_file, options.to, image=options.image, allow_changed=options.allow_changed, note=say_note
    )
    output, count = options.output, len(result.files) + len(result.models)
    if output is None and options.to is None and count > 1:
        output = check_output_folder(Path(f"export-{result.target}"))
    if output is not None:
        result.write(output)
        say_note(f"{count_of(count, 'file')} for {result.target} written to {output}")
    elif count == 1:
        sys.stdout.write(next(iter(result.files.values())))
    else:
        raise InputError(f"{options.to} makes {count} files", "name a directory with -o")


def report(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Sources: a database, maps, and --json of compare, simulate and load; default: the database "
            "and map.json, as far as they are there.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, output_option("File to write the page to.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page that opens from disk: interactive plots, in light and dark."""
    from gpuprof.pipeline.devices import database_path

    usual = [database_path(None), Path("map.json")]
    say_note(*gpuprof.report(sources or [path for path in usual if path.exists()], output).notes)
