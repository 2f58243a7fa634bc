"""The name on the package index, what says how to install extras, and the links that an index shows."""

import re
import tomllib
from pathlib import Path

import pytest

from gpuprof.errors import DISTRIBUTION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_distribution_is_called_what_hints_call_it_and_the_command_gpuprof() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert set(PROJECT["scripts"]) == {"gpuprof"}


def test_every_hint_in_the_sources_is_for_an_extra_that_exists() -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "gpuprof").rglob("*.py"))
    named = set(re.findall(r"install_hint\(['\"]([\w,]+)['\"]\)", texts))
    assert named and {extra for names in named for extra in names.split(",")} <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("page", ["docs/gpu.md", "docs/several-machines.md"])
def test_pages_install_the_distribution_by_its_name(page: str) -> None:
    for name in re.findall(r"pip install '([\w-]+)\[", (ROOT / page).read_text(encoding="utf-8")):
        assert name == DISTRIBUTION
