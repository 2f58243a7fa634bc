"""Verbs that write files: ``export``, a map for another tool, and ``report``, one HTML page of all results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.options import MapFileArgument, check_output_folder, output_option
from gpuprof.cli.output import say_note
from gpuprof.domain.plural import count_of
from gpuprof.errors import InputError


def _check_image(context: typer.Context, image: str | None) -> str | None:
    """Return the image; check that the target has the image it needs, before other steps of a run."""
    if not context.resilient_parsing and context.params.get("to"):
        from gpuprof.pipeline.export import check_target

        check_target(context.params["to"], image)
    return image


def export(
    map_file: MapFileArgument = Path("map.json"),
    to: Annotated[
        str | None,
        typer.Option(
            help="Tool to write for: json, mig-parted, triton, k8s, k8s-dra, k8s-kai, k8s-hami, kserve, ray-serve or "
            "envoy; default: mig-parted "
            "for a map with MIG instances, else triton."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            callback=check_output_folder,
            help="Directory to write to; default: a single file is printed, several go to export-TOOL.",
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(callback=_check_image, help="Container image with gpuprof, for Kubernetes and KServe.")
    ] = None,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Export model files that changed since the map was planned.")
    ] = False,
) -> None:
    """Write what another tool needs to run a map."""
    from gpuprof.pipeline.export import export as export_map

    result = export_map(map_file, to, image=image, allow_changed=allow_changed, note=say_note)
    is_single = len(result.files) == 1 and not result.models
    if output is None and to is None and not is_single:
        output = check_output_folder(Path(f"export-{result.target}"))
    if output is not None:
        result.write(output)
        say_note(f"{count_of(len(result.files) + len(result.models), 'file')} for {result.target} written to {output}")
    elif is_single:
        sys.stdout.write(next(iter(result.files.values())))
    else:
        raise InputError(f"{to} makes {len(result.files) + len(result.models)} files", "name a directory with -o")


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
    from gpuprof.pipeline.report import report as write_report

    usual = [database_path(None), Path("map.json")]
    say_note(*write_report(sources or [path for path in usual if path.exists()], output).notes)
