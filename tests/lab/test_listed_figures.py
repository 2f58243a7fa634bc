"""``bench/reproduce/README.md`` names the figures of ``gpuprof lab``, and commands that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from gpuprof.lab.laboratory import figure_titles

_PAGE = (Path(__file__).parents[2] / "bench" / "reproduce" / "README.md").read_text(encoding="utf-8")


def test_every_figure_that_is_named_exists_and_every_one_is_named() -> None:
    named = set(re.findall(r"`((?:parvagpu|igniter|usher|thesis)-[\w.]+)`", _PAGE))
    assert named - {"thesis-6.15"} == {name for name in figure_titles() if not name.startswith("thesis-6.15")}


def test_every_named_command_exists() -> None:
    listed = set(re.findall(r"python -m bench\.reproduce\.([a-z0-9_]+)", _PAGE))
    assert listed and all(importlib.util.find_spec(f"bench.reproduce.{name}") for name in listed)
