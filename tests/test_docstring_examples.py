"""The examples in docstrings are run as they stand; those of the public verbs are in tests/pipeline."""

import doctest
import importlib
from pathlib import Path

import pytest

import gpuprof

_ROOT = Path(gpuprof.__file__).parent
_MODULES = sorted(
    ".".join(("gpuprof", *path.relative_to(_ROOT).with_suffix("").parts))
    for path in _ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8") and path.relative_to(_ROOT).parts[0] != "pipeline"
)


@pytest.mark.parametrize("name", _MODULES)
def test_the_examples_of_a_module_do_what_they_show(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted
    assert results.failed == 0
