"""The examples in the docstrings of the public verbs are run as they stand, on the CPU."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import gpuprof
import gpuprof.pipeline
from tests.reruns import measures_in_real_time

#: They measure, or compile the simulator.
_MEASURING = {"calibrate", "db", "explain", "load", "profile", "report", "simulate", "train"}
_MODULES = sorted(module.name for module in pkgutil.iter_modules(gpuprof.pipeline.__path__))


def _examples(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(f"gpuprof.pipeline.{name}")
    return [example for example in doctest.DocTestFinder().find(module, globs={}) if example.examples]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[measures_in_real_time] if name in _MEASURING else []) for name in _MODULES]
)
def test_the_examples_of_a_verb_do_what_they_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUPROF_DB", raising=False)
    runner = doctest.DocTestRunner()
    for example in _examples(name):
        runner.run(example)
    assert runner.failures == 0


_VERBS = (
    *("calibrate", "check", "compare", "estimate", "evaluate", "explain", "export", "load", "merge", "place"),
    *("profile", "report", "serve", "simulate", "train"),
)


@pytest.mark.parametrize("verb", _VERBS)
def test_every_public_verb_has_an_example(verb: str) -> None:
    function = getattr(gpuprof, verb)
    assert callable(function)
    module = gpuprof._PUBLIC[verb].removeprefix("gpuprof.pipeline.")
    assert any(example.name.endswith(f".{verb}") for example in _examples(module))
