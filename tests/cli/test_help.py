"""The form of every line of help: each stands alone, a noun or an imperative first, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from gpuprof.cli.main import build_app, main
from gpuprof.errors import InputError

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


@pytest.mark.parametrize("group", ["db", "trace", "zoo"])
def test_no_list_of_commands_cuts_what_is_said_of_one(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group, "--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands")[2]
    assert len(listed.strip().splitlines()) > 1 and "…" not in listed


def _commands(command: Any) -> Iterator[Any]:
    inner = getattr(command, "commands", {})
    yield from () if inner else (command,)
    for subcommand in inner.values():
        yield from _commands(subcommand)


def test_every_command_refuses_an_option_of_one_value_that_is_given_twice() -> None:
    commands = list(_commands(typer.main.get_command(build_app())))
    assert len(commands) > 30
    for command in commands:
        taken = [
            parameter for parameter in command.params if parameter.param_type_name == "option" and not parameter.is_flag
        ]
        for option in taken:
            words = [word for value in ("1", "2") for word in (option.opts[-1], value)]
            if option.multiple:
                continue
            with pytest.raises(InputError, match=f"{max(option.opts, key=len)} is given 2 times"):
                command.parse_args(command.context_class(command, info_name=command.name), words)
