"""Machine code that was kept is found by all that it was compiled from, as that was loaded."""

from __future__ import annotations

import fcntl
import importlib
import itertools
import pkgutil
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

import gpuprof.simulator
from gpuprof.estimators.cross_gpu import forest_kernel
from gpuprof.estimators.queueing import pool_kernel
from gpuprof.machine.machine_code import code_directory, compile_function, describe_code, is_machine_code_cached

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
    assert not is_machine_code_cached(compiled)
    assert compiled(2.0) == 3.0
    assert is_machine_code_cached(compiled)
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


def test_machine_code_is_kept_apart_by_what_is_called_further_down(tmp_path: Path) -> None:
    file = tmp_path / "further_down.py"
    file.write_text("def rule(a):\n    return later(a)\n\n\ndef later(a):\n    return imported(a, a)\n")
    found = set()
    for source in _SOURCES[::2]:
        imported = compile_function(_define(source, LIMIT=1.0))
        inside: dict[str, Any] = {"__name__": "further_down", "imported": imported}
        exec(compile(file.read_text().split("\n\n\n")[0], str(file), "exec"), inside)
        found.add(code_directory(inside["rule"]))
    assert len(found) == 2


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


def _write_copy(folder: Path) -> Any:
    """Return the compiled function of a file of its own that holds what the files in other folders hold."""
    folder.mkdir()
    file = folder / "added.py"
    file.write_text("def add_one(value):\n    return value + 1.0\n")
    inside: dict[str, Any] = {"__name__": "added"}
    exec(compile(file.read_text(), str(file), "exec"), inside)
    return compile_function(inside["add_one"])


def _refuse_to_compile(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(args: object, return_type: object) -> None:
        raise AssertionError("compiled though its machine code is on disk")

    monkeypatch.setattr(compiled._compiler, "compile", refuse)


def test_what_one_copy_of_a_file_compiled_is_loaded_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = (_write_copy(tmp_path / name) for name in ("first", "second"))
    assert first(2.0) == 3.0
    assert is_machine_code_cached(second)
    _refuse_to_compile(second, monkeypatch)
    assert second(2.0) == 3.0


def test_what_another_process_compiles_is_waited_for_and_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = (_write_copy(tmp_path / name) for name in ("first", "second"))
    directory = code_directory(second.py_func)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        # What the other process does meanwhile: it compiles, keeps the code and gives up the lock.
        waited.append(seconds)
        monkeypatch.setattr("gpuprof.machine.machine_code._locked", {directory})
        first(2.0)
        monkeypatch.setattr("gpuprof.machine.machine_code._locked", set())
        fcntl.flock(other, fcntl.LOCK_UN)

    monkeypatch.setattr("gpuprof.machine.machine_code.time.sleep", sleep)
    _refuse_to_compile(second, monkeypatch)
    with (directory / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert second(2.0) == 3.0
    assert len(waited) == 1


def test_a_process_that_hangs_while_it_compiles_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("gpuprof.machine.machine_code._PATIENCE_S", 0.0)
    compiled = _write_copy(tmp_path / "only")
    with (code_directory(compiled.py_func) / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert compiled(2.0) == 3.0


def test_machine_code_is_kept_apart_by_the_order_of_fields_in_the_tuples_that_are_given() -> None:
    make_tuple = cast(Any, namedtuple)
    said = []
    for fields in (("near", "far"), ("far", "near")):
        inner, outer = make_tuple("inner", fields), make_tuple("outer", ["within"])
        outer.__annotations__ = {"within": inner}  # as `typing.NamedTuple` has them
        source = "def rule(state: Outer) -> float: return state.within.near"
        said.append(describe_code(_define(source, Outer=outer)))
    assert said[0] != said[1]


def test_a_function_runs_though_its_machine_code_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, result: Any) -> Any:
        raise RuntimeError("no compiled object yet for <Library 'serve'>")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("numba.core.caching.CompileResultCacheImpl.reduce", refuse)
    compiled = compile_function(_add_one)
    assert compiled(2.0) == 3.0 and not is_machine_code_cached(compiled)
