from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from gpuprof.cli.main import VERBS, build_app
from gpuprof.cli.option_groups import heading, with_groups
from gpuprof.cli.verb_help import VerbCommand

FrontOption = Annotated[str, typer.Option(help="In front.")]


@dataclass(frozen=True)
class Colours:
    """Which colours are used."""

    front: FrontOption = "red"
    behind: Annotated[int | None, typer.Option(min=1)] = None


@with_groups
def paint(
    colours: Colours,
    what: Annotated[str, typer.Argument()] = "wall",
    coats: Annotated[int, typer.Option(help="How often.")] = 1,
) -> None:
    """Paint WHAT."""
    typer.echo(f"{what} {colours}")


@dataclass(frozen=True)
class Pale(Colours):
    """Which pale colours are used."""


@with_groups
def tint(colours: Pale) -> None:
    """Tint a wall."""


def run(*words: str) -> tuple[int, str]:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=VerbCommand)(paint)
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_fields_of_a_group_are_options_with_their_defaults_beside_other_parameters() -> None:
    assert run() == (0, "wall Colours(front='red', behind=None)\n")
    assert run("door", "--front", "blue", "--behind", "3") == (0, "door Colours(front='blue', behind=3)\n")


def test_options_of_a_group_are_checked_and_described_as_any_other() -> None:
    assert run("--behind", "0")[0] == 2
    said = run("--help")[1]
    assert "--front" in said and "In front." in said and "Paint WHAT." in said


def sections(said: str) -> dict[str, list[str]]:
    """Return the long option names of a help by the heading that they stand under."""
    found: dict[str, list[str]] = {}
    for line in said.splitlines():
        if re.fullmatch(r"\S.*:", line):
            found[line[:-1]] = []
        elif found and (option := re.match(r"  (?:-\w, )?(--[\w-]+)", line)):
            found[list(found)[-1]].append(option[1])
    return found


def test_the_help_has_a_section_for_each_group_and_the_rest_of_the_options_last() -> None:
    assert sections(run("--help")[1]) == {
        "Arguments": [],
        "Which colours are used": ["--front", "--behind"],
        "Other options": ["--coats", "--help"],
    }


def test_what_options_do_stands_at_the_same_column_in_all_sections() -> None:
    lines = run("--help")[1].splitlines()
    assert len({line.index(said) for line in lines for said in ("In front.", "How often.") if said in line}) == 1


def test_a_verb_without_groups_keeps_its_plain_help() -> None:
    def wash(hot: Annotated[bool, typer.Option("--hot")] = False) -> None: ...

    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=VerbCommand)(wash)
    plain = typer.Typer(rich_markup_mode=None, add_completion=False)
    plain.command()(wash)
    said, expected = (CliRunner().invoke(one, ["--help"]).output for one in (app, plain))
    assert said == expected
    assert "Options:" in said


def test_a_group_without_words_of_its_own_is_called_by_its_name() -> None:
    @dataclass(frozen=True)
    class Brushes:
        wide: Annotated[bool, typer.Option("--wide")] = False

    assert heading(Brushes) == "Brushes"
    assert heading(Colours) == "Which colours are used"


def test_an_option_that_two_groups_share_stands_under_the_heading_of_each() -> None:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=VerbCommand)(tint)
    said = CliRunner().invoke(app, ["--help"]).output
    assert sections(said)["Which pale colours are used"] == ["--front", "--behind"]
    assert sections(run("--help")[1])["Which colours are used"] == ["--front", "--behind"]


def grouped_verbs() -> list[tuple[str, Callable[..., None]]]:
    """Return every verb that takes groups, by the words that call it."""
    found = []
    for verb in VERBS:
        defined = importlib.import_module(f"gpuprof.cli.{verb}")
        if hasattr(defined, "app"):
            commands = [(f"{verb} {one.callback.__name__}", one.callback) for one in defined.app.registered_commands]
        else:
            commands = [(verb, getattr(defined, verb))]
        found += [(words, function) for words, function in commands if hasattr(function, "__wrapped__")]
    return found


@pytest.mark.parametrize(("words", "function"), grouped_verbs())
def test_every_option_of_a_grouped_verb_stands_under_what_its_group_is(
    words: str, function: Callable[..., None]
) -> None:
    hints: dict[str, Any] = get_type_hints(function.__wrapped__)  # type: ignore[attr-defined]
    groups: list[Any] = [kind for kind in hints.values() if is_dataclass(kind)]
    assert groups
    assert len({heading(group) for group in groups}) == len(groups)
    said = CliRunner().invoke(build_app([words.split()[0]]), [*words.split(), "--help"]).output
    shown = sections(said)
    for group in groups:
        assert len(shown[heading(group)]) == len(fields(group))
    assert sum(map(len, shown.values())) == len(set().union(*shown.values()))
