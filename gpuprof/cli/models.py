"""Verbs of model files: ``zoo``, ``similarity`` and ``merge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gpuprof
from gpuprof.cli.options import NetworksArgument, Verbs, complete_devices, output_option
from gpuprof.cli.output import Format, print_rows, say_note, show_progress
from gpuprof.domain.deployment import LARGEST_BATCH
from gpuprof.domain.table import make_columns, mebibytes
from gpuprof.errors import InputError

zoo = Verbs(help="Build standard networks as ONNX files with random weights, offline, or change a network's batch.")

_NETWORKS = make_columns(
    "name origin parameters input:input_of_one_item needs", {"input": lambda value: str(value).replace("[batch, ", "[")}
)

Output = Annotated[Path | None, output_option("File to write.", show_default=False)]
Batch = Annotated[str, typer.Option("--batch", help="Batch size, or dynamic for a free one.")]


@zoo.command("list")
def list_networks(chosen: Format = Format.TABLE) -> None:
    """List the networks that can be built."""
    rows = gpuprof.list_models().rows()
    if chosen is not Format.TABLE:
        print_rows(rows, _NETWORKS, chosen)
        return
    print_rows(rows, [column for column in _NETWORKS if column.key != "needs"], chosen)
    for origin, needs in dict.fromkeys((row["origin"], row["needs"]) for row in rows if row["needs"]):
        say_note(f"networks of {origin} need the extra {needs} to be built")


@zoo.command("build", short_help="Build a network.")
def build_network(
    name: Annotated[str, typer.Argument(help="Name of a network, from gpuprof zoo list.")],
    output: Output = None,
    batch: Batch = "dynamic",
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the random weights, and of the layers of random networks.")
    ] = 0,
) -> None:
    """Build a network and write it to NAME.onnx, or to the file given by -o."""
    path = gpuprof.build_model(name, output, batch=_batch(batch), seed=seed)
    say_note(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)")


@zoo.command("rebatch", short_help="Change the batch that a model fixes.")
def rebatch_model(
    model: Annotated[Path, typer.Argument(help="ONNX file.")],
    output: Annotated[Path, output_option("File to write.")],
    batch: Batch = "dynamic",
) -> None:
    """Change the batch that a model fixes, and prove by running both that it computes the same."""
    from gpuprof.pipeline.zoo import rebatch_model as change_batch

    say_note(change_batch(model, output, batch=_batch(batch)))


def _batch(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST_BATCH:
        raise InputError(f"--batch must be a number from 1 to {LARGEST_BATCH:,}, or 'dynamic', but is {text!r}")
    return int(text)


_MODELS = make_columns(
    "first:model second:compared_with layers:pairs_of_layers all_pairs:mean_of_all_pairs "
    "matched:mean_of_the_best_matching exact",
    {"exact": lambda value: "yes" if value else "≥"},
)


def similarity(models: NetworksArgument, chosen: Format = Format.TABLE) -> None:
    """Compare the weights of models layer by layer: the longest common submatrix of each pair (USHER §2.4)."""
    from gpuprof.merging.similarity import text_map

    with show_progress() as show:
        result = gpuprof.similarity(models, progress=show)
    print_rows(result.rows(), _MODELS, chosen)
    if chosen is Format.TABLE:
        for pair in result.pairs:
            for line in text_map(pair):
                typer.echo(line)


_SUMMARY = make_columns(
    "file models operators_merged operators_sharing:sharing_weights operators:of other_ops_merged:other_ops "
    "weight_bytes_before:weights_MiB weight_bytes_after:merged_MiB predicted_gain_us:predicted_gain_µs "
    "largest_difference",
    {"weight_bytes_before": mebibytes, "weight_bytes_after": mebibytes},
)


def merge(
    models: NetworksArgument,
    output: Annotated[Path, output_option("File to write.")],
    settings: gpuprof.MergeSettings,
    device: Annotated[
        str | None, typer.Option(autocompletion=complete_devices, help="Device that the gain is predicted for.")
    ] = "cpu",
    chosen: Format = Format.TABLE,
) -> None:
    """Merge models that share weights into one graph, prove that its outputs are the same, and write it.

    --json lists every operator and output.
    """
    merged = gpuprof.merge(models, output, settings=settings, device=device)
    say_note(*merged.notes)
    print_rows(merged.rows(), _SUMMARY, chosen)
