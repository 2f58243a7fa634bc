"""The form of every line of help: each stands alone, a noun or an imperative first, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from gpuprof.cli.main import build_app

#: Words that need what stands before them, which a line of help does not have.
_LEANING = set(
    re.findall(
        r"\w+",
        "a an and another as at but by else from how if in instead into it its like not of on or so than that the "
        "their then these they this those times to when where which with without what who why",
    )
)


def _lines(command: Any, path: str) -> Iterator[tuple[str, str]]:
    yield path, (command.help or "").split("\n\n")[0].replace("\n", " ")
    for parameter in command.params:
        if parameter.name != "help":
            yield f"{path} {parameter.opts[0]}", getattr(parameter, "help", None) or ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _lines(inner, f"{path} {name}")


LINES = sorted(set(_lines(typer.main.get_command(build_app()), "gpuprof")))


@pytest.mark.parametrize(("where", "line"), LINES, ids=[where for where, _ in LINES])
def test_every_line_of_help_stands_alone(where: str, line: str) -> None:
    assert line, f"{where} has no help"
    first = re.match(r"[^\s,:;.]+", line)
    assert first is not None and (first[0][0].isupper() or first[0] == "gRPC"), line
    assert first[0].lower() not in _LEANING, f"{line!r} leans on what is not there"
    assert line.endswith(".") and not line.endswith(".."), line
    assert "(s)" not in line and "unless given" not in line


def test_there_are_as_many_lines_as_the_commands_have_options() -> None:
    assert len(LINES) > 250
    assert len({where for where, _ in LINES}) == len(LINES)
