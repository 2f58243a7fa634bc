"""Options of ``gpuprof merge``, in groups: what is written, what is alike, at which sizes, and where it must pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.completion import complete_devices
from gpuprof.cli.output_path import output_option
from gpuprof.errors import InputError


@dataclass(frozen=True)
class MergeOutput:
    """Where the merged graph is written, and what is told of it."""

    output: Annotated[Path, output_option("File to write.")]
    report: Annotated[bool, typer.Option("--report", help="List every operator and every output.")] = False


@dataclass(frozen=True)
class SimilarityThresholds:
    """How alike operators, weights and outputs must be."""

    omega: Annotated[float, typer.Option(help="Least similarity of operators to merge.")] = 0.4
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest relative difference of an output.", show_default="1e-4, for float16 4e-3"),
    ] = None
    weight_tolerance: Annotated[float, typer.Option(help="Largest difference of weights that count as the same.")] = (
        1e-7
    )
    eps: Annotated[
        float,
        typer.Option(
            help="Largest edit distance of two architectures, per op and edge; beyond 7 ops an upper bound of it "
            "(assignment of Riesen and Bunke)."
        ),
    ] = 0.25


@dataclass(frozen=True)
class DimensionSizes:
    """At which sizes the models run."""

    dim: Annotated[list[str] | None, typer.Option(help="Size of a free dimension: NAME=SIZE; may be repeated.")] = None
    batch: Annotated[
        list[str] | None, typer.Option(help="Batch that a model will run at: NAME=SIZE; may be repeated.")
    ] = None

    def dims(self) -> dict[str, int]:
        """Return the size of each free dimension that is named. Raises `InputError` when one cannot be read."""
        return _sizes("--dim", self.dim or [])

    def batches(self) -> dict[str, int]:
        """Return the batch of each model that is named. Raises `InputError` when one cannot be read."""
        return _sizes("--batch", self.batch or [])


@dataclass(frozen=True)
class GainOptions:
    """For which device merging must pay."""

    device: Annotated[
        str | None, typer.Option(autocompletion=complete_devices, help="Device that the gain is predicted for.")
    ] = "cpu"
    db: Annotated[Path | None, typer.Option(help="Kernel database: what ops were measured to take.")] = None
    force: Annotated[bool, typer.Option("--force", help="Merge what is predicted to cost time, too.")] = False


def _sizes(option: str, given: Sequence[str]) -> dict[str, int]:
    """Read ``NAME=SIZE``."""
    sizes = {}
    for text in given:
        name, equals, size = text.rpartition("=")
        if not equals or not name or not size.isdigit() or int(size) < 1:
            raise InputError(f"cannot read {option} {text!r}", f"write it as {option} NAME=SIZE")
        sizes[name] = int(size)
    return sizes
