"""``gpuprof zoo``: standard networks as ONNX files with random weights, and any network at another batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.output import Column, CsvOption, JsonOption, chosen_format, number, print_rows, say
from gpuprof.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Build standard networks as ONNX files with random weights, offline, or change a network's batch.",
)

_COLUMNS = [
    Column("name", "name", right=False),
    Column("origin", "origin", right=False),
    Column("parameters", "parameters", number(4)),
    Column("input", "input", right=False),
    Column("needs", "needs", right=False),
]

Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write.", show_default=False)]
Batch = Annotated[str, typer.Option("--batch", help="A number, or 'dynamic' for a free batch.")]


@app.command("list")
def list_networks(as_json: JsonOption = False, as_csv: CsvOption = False) -> None:
    """List the networks that can be built."""
    from dataclasses import asdict

    from gpuprof.zoo.architecture import ARCHITECTURES

    print_rows([asdict(a) for a in ARCHITECTURES.values()], _COLUMNS, chosen_format(as_json, as_csv))


@app.command("build")
def build_network(
    name: Annotated[str, typer.Argument(help="A name from 'gpuprof zoo list'.")],
    output: Output = None,
    batch: Batch = "dynamic",
    seed: Annotated[
        int, typer.Option("--seed", help="Of the random weights, and of the layers of what is called random.")
    ] = 0,
) -> None:
    """Build a network; it goes to NAME.onnx unless -o says otherwise."""
    from gpuprof.zoo.architecture import find_architecture
    from gpuprof.zoo.build import build

    architecture = find_architecture(name)
    written = build(architecture, output or Path(f"{architecture.name}.onnx"), _batch(batch), seed)
    say(f"wrote {written} ({written.stat().st_size / 2**20:.1f} MiB)")


@app.command("rebatch")
def rebatch_model(
    model: Annotated[Path, typer.Argument(help="An ONNX file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    batch: Batch = "dynamic",
) -> None:
    """Change the batch that a model fixes, and prove by running both that it computes the same."""
    from gpuprof.runtime.free_batch import is_dynamic, rebatch

    size = _batch(batch)
    free = is_dynamic(model)
    changed = rebatch(model, output, size)
    said = "its batch was free already" if free else f"its batch was {changed.batch}"
    count = f"{len(changed.nodes)} node{'' if len(changed.nodes) == 1 else 's'} changed"
    say(f"wrote {output}: {said}, {count}, same outputs at batches {changed.batch} and more")


def _batch(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--batch must be a positive number or 'dynamic' but is {text!r}")
    return int(text)
