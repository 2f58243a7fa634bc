"""Options of ``gpuprof merge``, in groups: what is written, what is alike, at which sizes, and where it must pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.merging.pipeline import MergeOptions


@dataclass(frozen=True)
class MergeOutput:
    """Where the merged graph is written, and what is told of it."""

    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")]
    report: Annotated[bool, typer.Option("--report", help="List every operator and every output.")] = False

    def check(self, models: Sequence[Path]) -> None:
        """Make sure that no model would be overwritten.

        Raises
        ------
        InputError
            When one would.
        """
        if any(self.output.resolve() == model.resolve() for model in models):
            raise InputError(f"{self.output} is one of the models to merge", "write to another file")

    def paths(self, count: int) -> list[Path]:
        """Return the file of each of so many merged graphs."""
        return [self.output if i == 0 else self.output.with_stem(f"{self.output.stem}-{i + 1}") for i in range(count)]


@dataclass(frozen=True)
class SimilarityThresholds:
    """How alike operators, weights and outputs must be."""

    omega: Annotated[float, typer.Option(help="Least similarity of operators to merge.")] = 0.4
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest relative difference of an output.", show_default="1e-4, for float16 4e-3"),
    ] = None
    weight_tolerance: Annotated[float, typer.Option(help="Weights that differ by no more are the same.")] = 1e-7
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

    dim: Annotated[list[str] | None, typer.Option(help="Size of a free dimension: NAME=SIZE, repeatable.")] = None
    batch: Annotated[list[str] | None, typer.Option(help="Batch that a model will run at: NAME=SIZE.")] = None

    def dims(self) -> dict[str, int]:
        """Return the size of each free dimension that is named.

        Raises
        ------
        InputError
            When one cannot be read.
        """
        return _sizes("--dim", self.dim or [])

    def batches(self) -> dict[str, int]:
        """Return the batch of each model that is named.

        Raises
        ------
        InputError
            When one cannot be read.
        """
        return _sizes("--batch", self.batch or [])


@dataclass(frozen=True)
class GainOptions:
    """For which device merging must pay."""

    device: Annotated[str | None, typer.Option(help="Device that the gain is predicted for.")] = "cpu"
    db: Annotated[Path | None, typer.Option(help="Kernel database: what ops were measured to take.")] = None
    force: Annotated[bool, typer.Option("--force", help="Merge what is predicted to cost time, too.")] = False

    def options(self, models: Sequence[Path], likeness: SimilarityThresholds, sizes: DimensionSizes) -> MergeOptions:
        """Return how ``models`` are to be merged.

        Raises
        ------
        InputError
            When the device, the database or a size is not what it should be.
        """
        from gpuprof.merging.gain import device_rates
        from gpuprof.merging.pipeline import MergeOptions
        from gpuprof.pipeline.devices import open_database, resolve_device
        from gpuprof.pipeline.op_seconds import read_op_seconds

        database = open_database(self.db, needed=False)
        target = resolve_device(self.device, database)
        return MergeOptions(
            omega=likeness.omega,
            weight_tolerance=likeness.weight_tolerance,
            eps=likeness.eps,
            proof_tolerance=likeness.tolerance,
            force=self.force,
            dims=sizes.dims(),
            batches=sizes.batches(),
            rates=device_rates(target),
            measured=read_op_seconds(database, target, models),
        )


def _sizes(option: str, given: Sequence[str]) -> dict[str, int]:
    """Read ``NAME=SIZE``."""
    found = {}
    for text in given:
        name, equals, size = text.rpartition("=")
        if not equals or not name or not size.isdigit() or int(size) < 1:
            raise InputError(f"cannot read {option} {text!r}", f"write it as {option} NAME=SIZE")
        found[name] = int(size)
    return found
