"""``gpuprof merge``: several models that share weights become one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.completion import complete_devices, complete_models
from gpuprof.cli.option_groups import fill_settings, with_groups
from gpuprof.cli.output import Column, CsvOption, Format, JsonOption, chosen_format, mebibytes, print_rows, say_note
from gpuprof.cli.output_path import output_option
from gpuprof.domain.number_format import number_formatter
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.pipeline.merge import MergedFile

_SUMMARY = (
    Column("file", "file", right=False),
    Column("models", "models", lambda value: ", ".join(value) if isinstance(value, list) else str(value), right=False),
    Column("operators_merged", "operators merged"),
    Column("operators_sharing", "sharing weights"),
    Column("operators", "of"),
    Column("other_ops_merged", "other ops"),
    Column("weight_bytes_before", "weights MiB", mebibytes),
    Column("weight_bytes_after", "merged MiB", mebibytes),
    Column("predicted_gain_us", "predicted gain µs", number_formatter()),
    Column("largest_difference", "largest difference", number_formatter()),
)
_OPERATORS = (
    Column("how", "how", right=False),
    Column("op_type", "type", right=False),
    Column("operators", "operators", lambda v: " + ".join(v) if isinstance(v, list) else str(v), right=False),
    Column("similarity", "similarity", number_formatter()),
    Column("weight_bytes", "weights MiB", mebibytes),
    Column("saved_bytes", "saved MiB", mebibytes),
    Column("reason", "why not", right=False),
)
_DIFFERENCES = (
    Column("model", "model", right=False),
    Column("output", "output", right=False),
    Column("dtype", "type", right=False),
    Column("relative", "difference", number_formatter()),
    Column("tolerance", "tolerated", number_formatter()),
    Column("call", "in the call", right=False),
)


@dataclass(frozen=True)
class MergeOutput:
    """Where the merged graph is written, and what is printed of it."""

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


@with_groups
def merge(
    models: Annotated[list[Path], typer.Argument(autocompletion=complete_models, help="ONNX files, two or more.")],
    result: MergeOutput,
    likeness: SimilarityThresholds,
    sizes: DimensionSizes,
    gain: GainOptions,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Merge models that share weights into one graph, prove that it gives the same, and write it."""
    from gpuprof.pipeline.merge import MergeSettings
    from gpuprof.pipeline.merge import merge as merge_models

    chosen = chosen_format(as_json, as_csv)
    settings = fill_settings(MergeSettings, likeness, gain, dims=sizes.dims(), batches=sizes.batches())
    merged = merge_models(models, result.output, settings=settings, device=gain.device, db=gain.db)
    say_note(*merged.notes)
    _print(merged.files, chosen, result.report)


def _print(files: Sequence[MergedFile], chosen: Format, report: bool) -> None:
    if report and chosen is not Format.JSON:
        for file in files:
            print_rows(file.operator_rows(), _OPERATORS, chosen, f"operators of {file.path}")
            if chosen is Format.TABLE:
                print_rows(file.output_rows(), _DIFFERENCES, chosen, f"outputs of {file.path}")
        if chosen is Format.CSV:
            return
    full = report and chosen is Format.JSON
    print_rows([file.full_row() if full else file.row() for file in files], _SUMMARY, chosen)
