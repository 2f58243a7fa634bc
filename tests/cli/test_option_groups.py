from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from gpuprof.cli.option_groups import with_groups


@dataclass(frozen=True)
class Colours:
    front: Annotated[str, typer.Option(help="In front.")] = "red"
    behind: Annotated[int | None, typer.Option(min=1)] = None


@with_groups
def paint(colours: Colours, what: Annotated[str, typer.Argument()] = "wall") -> None:
    """Paint WHAT."""
    typer.echo(f"{what} {colours}")


def run(*words: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(paint)
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_fields_of_a_group_are_options_with_their_defaults_beside_other_parameters() -> None:
    assert run() == (0, "wall Colours(front='red', behind=None)\n")
    assert run("door", "--front", "blue", "--behind", "3") == (0, "door Colours(front='blue', behind=3)\n")


def test_options_of_a_group_are_checked_and_described_as_any_other() -> None:
    assert run("--behind", "0")[0] == 2
    said = run("--help")[1]
    assert "--front" in said and "In front." in said and "Paint WHAT." in said
