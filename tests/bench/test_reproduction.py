"""Facts, tables and the command around a reproduction."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.reproduce import command
from bench.reproduce.reproduction import Fact, Reproduction, lines, mean, text_table
from gpuprof.errors import InputError
from gpuprof.reporting.chart import Axis


@pytest.mark.parametrize(
    ("printed", "ours", "digits", "agrees"),
    [
        (12.5, 12.54, 1, True),
        (12.5, 12.56, 1, False),
        (7, 7, 0, True),
        (7, 8, 0, False),
        ((1.5, 1.9), 1.94, 1, True),
        ((1.5, 1.9), 1.44, 1, False),
        ((2.0, math.inf), 31.0, 0, True),
        ((2.0, math.inf), 1.0, 0, False),
        (3, None, 0, False),
    ],
)
def test_a_number_agrees_to_the_digits_that_are_printed(
    printed: float | tuple[float, float], ours: float | None, digits: int, agrees: bool
) -> None:
    fact = Fact("what", "§1", printed, ours, digits)
    assert fact.agrees is agrees
    assert fact.row()[-1] == ("as printed" if agrees else "differs")


def test_facts_show_ranges_and_what_is_missing() -> None:
    assert Fact("a", "§1", (1.5, 1.9), None, 1).row()[2:4] == ("1.5…1.9", "–")
    assert Fact("a", "§1", (2.0, math.inf), 3.0).row()[2:4] == ("at least 2", "3")


def test_a_table_puts_words_left_and_numbers_right() -> None:
    assert text_table(("name", "GPUs"), [("a", 12.0), ("bcd", None)]).splitlines() == [
        "name  GPUs",
        "────  ────",
        "a       12",
        "bcd      –",
    ]


def test_the_mean_is_of_what_is_known() -> None:
    assert mean([1.0, None, 3.0]) == 2.0
    assert mean([None]) is None


def example(*, sound: bool = True) -> Reproduction:
    chart = lines("title", Axis("x (s)"), Axis("y (GPUs)"), {"one": {1.0: 2.0, 2.0: None, 3.0: 4.0}})
    return Reproduction("Title", ("p", "n"), (("a", 1.0),), (Fact("w", "§2", 1, 1),), ("why",), (chart,), sound)


def test_a_line_leaves_out_what_is_not_known() -> None:
    assert example().charts[0].lines[0].x == (1.0, 3.0)


def test_the_command_prints_table_facts_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run("about", lambda _: example(), []) == 0
    out = capsys.readouterr().out
    assert "Title" in out
    assert "as printed" in out
    assert "* why" in out


def test_the_command_draws_and_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "one.svg"
    assert command.run("about", lambda _: example(), ["--json", "--plot", str(picture)]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [["a", 1.0]]
    assert "y (GPUs)" in picture.read_text()


def test_several_charts_are_several_files(tmp_path: Path) -> None:
    one = example()
    both = Reproduction(one.title, one.header, one.rows, one.facts, one.differences, one.charts * 2)
    command.draw(both, tmp_path / "a.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1.svg", "a-2.svg"]


def test_an_unsound_map_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run("about", lambda _: example(sound=False), []) == 1
    assert "NOT SOUND" in capsys.readouterr().out


def test_measurements_that_are_not_there_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def compute(reference: Path) -> Reproduction:
        command.find_published(reference, "parvagpu_a100", "somewhere")
        return example()

    assert command.run("about", compute, ["--reference", str(tmp_path)]) == InputError.exit_code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "copy somewhere there" in error
