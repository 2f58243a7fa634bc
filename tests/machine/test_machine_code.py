"""Machine code that was kept is found by all that it was compiled from, as that was loaded."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gpuprof.simulator
from gpuprof.estimators.cross_gpu import forest_kernel
from gpuprof.estimators.queueing import pool_kernel
from gpuprof.machine.machine_code import code_directory, compile_function, describe_code, is_kept

_SOURCES = [
    "def rule(a, b): return a + b * 2.0 + LIMIT",
    "def rule(a, b, c): return a + b * 2.0 + LIMIT",
    "def rule(a, b): return a + b * 3.0 + LIMIT",
    "def rule(a, b): return a - b * 2.0 + LIMIT",
]


def _define(source: str, **names: Any) -> Any:
    inside: dict[str, Any] = {"__name__": "made_up", **names}
    exec(source, inside)
    return inside["rule"]


def test_machine_code_is_kept_apart_by_parameters_literals_and_constants() -> None:
    said = {describe_code(_define(source, LIMIT=limit)) for source, limit in itertools.product(_SOURCES, (1.0, 2.0))}
    assert len(said) == 2 * len(_SOURCES)


@pytest.mark.parametrize("depth", [1, 3])
def test_machine_code_is_kept_apart_by_what_is_called_however_deep(depth: int) -> None:
    said = set()
    for source in _SOURCES[::2]:
        rule = _define(source, LIMIT=1.0)
        for level in range(depth):
            rule = _define(
                "def rule(a, b): return inner(a, b)".replace("rule", f"rule{level}") + f"\nrule = rule{level}",
                inner=rule,
            )
        said.add(code_directory(rule))
    assert len(said) == 2


def test_the_same_code_is_found_again() -> None:
    assert describe_code(_define(_SOURCES[0], LIMIT=1.0)) == describe_code(_define(_SOURCES[0], LIMIT=1.0))


def test_what_was_compiled_is_kept_where_its_own_code_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = compile_function(_add_one)
    assert not is_kept(compiled)
    assert compiled(2.0) == 3.0
    assert is_kept(compiled)
    assert str(code_directory(_add_one)).startswith(str(tmp_path))


def test_machine_code_is_kept_apart_by_the_file_for_what_is_defined_further_down(tmp_path: Path) -> None:
    found = []
    for number in (1, 2):
        file = tmp_path / "later.py"
        file.write_text(f"def rule(a):\n    return later(a)\n\n\ndef later(a):\n    return a + {number}\n")
        inside: dict[str, Any] = {"__name__": "later"}
        exec(compile(file.read_text().split("\n\n\n")[0], str(file), "exec"), inside)
        found.append(code_directory(inside["rule"]))
    assert found[0] != found[1]


def _add_one(value: float) -> float:
    return value + 1.0


def _uses(function: Any, module: str) -> set[str]:
    """Return the functions of other modules that a function calls, and those of its own that it calls."""
    plain, found = function.py_func, set()
    for name in plain.__code__.co_names:
        inner = getattr(plain.__globals__.get(name), "py_func", None)
        if inner is not None and inner.__module__ != module:
            found.add(f"{inner.__module__}.{inner.__qualname__}")
    return found


@pytest.mark.parametrize(
    "module",
    [
        forest_kernel,
        pool_kernel,
        *(
            importlib.import_module(f"gpuprof.simulator.{one.name}")
            for one in pkgutil.iter_modules(gpuprof.simulator.__path__)
        ),
    ],
    ids=lambda module: module.__name__,
)
def test_what_a_function_calls_of_other_modules_is_part_of_the_key(module: ModuleType) -> None:
    for one in (one for one in vars(module).values() if hasattr(one, "py_func")):
        for name in _uses(one, one.py_func.__module__):
            assert name in describe_code(one)


def test_what_another_copy_of_the_file_left_is_not_taken_for_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copies = []
    for name in ("first", "second"):
        file = tmp_path / name / "added.py"
        file.parent.mkdir()
        file.write_text("def add_one(value):\n    return value + 1.0\n")
        inside: dict[str, Any] = {"__name__": "added"}
        exec(compile(file.read_text(), str(file), "exec"), inside)
        copies.append(compile_function(inside["add_one"]))
    assert copies[0](2.0) == 3.0
    assert [is_kept(copy) for copy in copies] == [True, False]


def test_a_function_runs_though_its_machine_code_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, result: Any) -> Any:
        raise RuntimeError("no compiled object yet for <Library 'serve'>")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("numba.core.caching.CompileResultCacheImpl.reduce", refuse)
    compiled = compile_function(_add_one)
    assert compiled(2.0) == 3.0 and not is_kept(compiled)
