"""``gpuprof export``: a deployment map for mig-parted, Triton or Kubernetes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.output import say_note
from gpuprof.errors import InputError


def export(
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map.")] = Path("map.json"),
    to: Annotated[str, typer.Option(help="json, mig-parted, triton or k8s.")] = "mig-parted",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Directory to write to; without it a single file is printed.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image of the Kubernetes manifest.")] = None,
) -> None:
    """Write a map in the words of another tool."""
    from gpuprof.domain.deployment import read_map
    from gpuprof.pipeline.recorded_problem import map_evidence
    from gpuprof.placement.export import export as written
    from gpuprof.placement.feasibility import check_layout

    deployment = read_map(map_file)
    broken = check_layout(deployment, map_evidence(deployment, None, None, map_file.parent, say_note))
    if broken:
        raise InputError(f"{map_file} cannot be set up: {broken[0]}", f"gpuprof check {map_file} says everything")
    files = written(deployment, to, image)
    if output is None and len(files) == 1:
        sys.stdout.write(next(iter(files.values())))
        return
    if output is None:
        raise InputError(f"{to} makes {len(files)} files", "name a directory with -o")
    try:
        for name, content in files.items():
            path = output / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}") from None
    say_note(f"{len(files)} files written to {output}")
