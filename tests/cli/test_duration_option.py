"""Lengths of time on the command line: one form for all verbs, and numbers alone in the option's own unit."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from gpuprof.cli.main import build_app
from gpuprof.domain.validation import parse_duration
from gpuprof.errors import InputError

#: Options that are numbers of a unit, by verb, and what 500ms is in it.
OPTIONS = {
    "place": {"--time-limit": 0.5},
    "compare": {"--time-limit": 0.5},
    "profile": {"--time-limit": 0.5},
    "calibrate": {"--time-limit": 0.5},
    "serve": {"--hang-s": 0.5, "--adapt-period": 0.5},
    "simulate": {"--host-ms": 500.0},
}
#: Arguments that a verb cannot be without.
FILES = {"profile": ["m.onnx"], "calibrate": ["m.onnx", "n.onnx"], "simulate": ["map.json"]}


def read(verb: str, option: str, text: str) -> Any:
    """Return what an option of a verb makes of a text."""
    group: Any = typer.main.get_command(build_app([verb]))
    command = group.commands[verb]
    name = next(parameter.name for parameter in command.params if option in parameter.opts)
    return command.make_context(verb, [option, text, *FILES.get(verb, ())]).params[name]


@pytest.mark.parametrize(("verb", "option"), [(verb, name) for verb, names in OPTIONS.items() for name in names])
def test_options_of_time_take_units_and_numbers_alone_in_their_own(verb: str, option: str) -> None:
    expected = OPTIONS[verb][option]
    assert read(verb, option, "500ms") == expected
    assert read(verb, option, "0.5 s") == expected
    assert read(verb, option, f"{expected:g}") == expected
    with pytest.raises(InputError, match=f"cannot read {option} from '-1'"):
        read(verb, option, "-1")


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), ("3s", 3.0), ("1e-3", 1e-3), ("2m", 120.0), ("1.5 min", 90.0), ("1d", 86400.0)]
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
