"""``gpuprof zoo``: standard networks as ONNX files with random weights, and any network at another batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.completion import COMPLETERS
from gpuprof.cli.options import Verbs, output_option
from gpuprof.cli.output import Format, make_columns, print_rows, say_note
from gpuprof.errors import InputError
from gpuprof.pipeline.settings import LARGEST_BATCH

app = Verbs(
    help="Build standard networks as ONNX files with random weights, offline, or change a network's batch.",
)

_COLUMNS = make_columns(
    "name origin parameters input:input_of_one_item needs",
    {"input": lambda value: str(value).replace("[batch, ", "[")},
)

Output = Annotated[Path | None, output_option("File to write.", show_default=False)]
Batch = Annotated[str, typer.Option("--batch", help="Batch size, or dynamic for a free one.")]


@app.command("list")
def list_networks(chosen: Format = Format.TABLE) -> None:
    """List the networks that can be built."""
    from gpuprof.pipeline.zoo import list_models

    rows = list_models().rows()
    if chosen is not Format.TABLE:
        print_rows(rows, _COLUMNS, chosen)
        return
    print_rows(rows, [column for column in _COLUMNS if column.key != "needs"], chosen)
    for origin, needs in dict.fromkeys((row["origin"], row["needs"]) for row in rows if row["needs"]):
        say_note(f"networks of {origin} need the extra {needs} to be built")


@app.command("build", short_help="Build a network.")
def build_network(
    name: Annotated[
        str, typer.Argument(autocompletion=COMPLETERS["networks"], help="Name of a network, from gpuprof zoo list.")
    ],
    output: Output = None,
    batch: Batch = "dynamic",
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the random weights, and of the layers of random networks.")
    ] = 0,
) -> None:
    """Build a network; it goes to NAME.onnx unless -o says otherwise."""
    from gpuprof.pipeline.zoo import build_model

    path = build_model(name, output, batch=_batch(batch), seed=seed)
    say_note(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)")


@app.command("rebatch", short_help="Change the batch that a model fixes.")
def rebatch_model(
    model: Annotated[Path, typer.Argument(help="ONNX file.")],
    output: Annotated[Path, output_option("File to write.")],
    batch: Batch = "dynamic",
) -> None:
    """Change the batch that a model fixes, and prove by running both that it computes the same."""
    from gpuprof.pipeline.zoo import rebatch_model as change_batch

    say_note(*change_batch(model, output, batch=_batch(batch)).notes)


def _batch(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST_BATCH:
        raise InputError(f"--batch must be a number from 1 to {LARGEST_BATCH:,}, or 'dynamic', but is {text!r}")
    return int(text)
