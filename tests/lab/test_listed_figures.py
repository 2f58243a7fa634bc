"""``bench/reproduce/README.md``: every figure and table of the papers, and commands that exist."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprof.lab.figures import figure_titles

_PAGE = (Path(__file__).parents[2] / "bench" / "reproduce" / "README.md").read_text(encoding="utf-8")
#: Heading → figures and tables that the paper has.
_PAPERS = {
    "ParvaGPU": [*map(str, range(1, 12)), "Table I", "Table II", "Table III", "Table IV"],
    "iGniter": [*map(str, range(1, 22)), *(f"Table {number}" for number in range(1, 5))],
    "USHER": [*map(str, range(1, 27)), *(f"Table {number}" for number in range(1, 5))],
    "Elvinger's thesis": [
        *(
            f"{chapter}.{number}"
            for chapter, last in ((2, 3), (4, 5), (5, 10), (6, 19))
            for number in range(1, last + 1)
        ),
        *(f"A.{number}" for number in range(1, 4)),
        *(f"Table {name}" for name in ("3.1", "4.1", "5.1", "5.2", "5.3", "6.1", "6.2", "6.3", "6.4", "6.5", "A.1")),
    ],
}
_ROMAN = ("I", "II", "III", "IV")


@pytest.mark.parametrize("paper", _PAPERS)
def test_every_figure_and_table_of_the_papers_is_listed(paper: str) -> None:
    part = _PAGE.split(f"\n### {paper}")[1].split("\n### ")[0]
    listed = {name for row in part.splitlines() if row.startswith("| ") for name in read_names(row.split("|")[1])}
    assert listed >= set(_PAPERS[paper])


def test_every_figure_that_is_named_exists_and_every_one_is_named() -> None:
    named = set(re.findall(r"`((?:parvagpu|igniter|usher|thesis)-[\w.]+)`", _PAGE))
    assert named - {"thesis-6.15"} == {name for name in figure_titles() if not name.startswith("thesis-6.15")}


def test_every_named_command_exists() -> None:
    listed = set(re.findall(r"python -m bench\.reproduce\.([a-z0-9_]+)", _PAGE))
    assert listed and all(importlib.util.find_spec(f"bench.reproduce.{name}") for name in listed)


def read_names(cell: str) -> Iterator[str]:
    """Yield the figures and tables in the first cell of a row, with those between the ends of a range."""
    prefix = ""
    for item in re.split(r"[,;] ?", cell.strip()):
        text = item
        if item.startswith("Table"):
            prefix, text = "Table ", re.sub(r"^Tables? ", "", item)
        first, _, last = text.partition(" to ")
        yield from (prefix + name for name in list_range(first, last))


def list_range(first: str, last: str) -> Iterator[str]:
    """Yield the names from ``first`` to ``last``; a letter behind a figure stands for a part of it."""
    if not last:
        yield re.sub(r"(?<=\d)[a-z]$", "", first.strip())
    elif first in _ROMAN:
        yield from _ROMAN[_ROMAN.index(first) : _ROMAN.index(last) + 1]
    else:
        chapter, _, number = first.rpartition(".")
        until = last.rpartition(".")[2]
        yield from (f"{chapter}.{n}" if chapter else str(n) for n in range(int(number), int(until) + 1))
