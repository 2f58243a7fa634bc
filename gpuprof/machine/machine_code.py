"""Machine code of Python functions by numba, cached on disk in a directory named by a hash of all its sources.

numba's own cache checks only the file of the outermost function: after a change of `gpuprof.rules.routing`, the old
code would still run.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class _Spent:
    """Time spent within `compiling`."""

    clock_s: float = 0.0
    cpu_s: float = 0.0


_SPENT = _Spent()


@contextmanager
def compiling() -> Iterator[None]:
    """Exclude the time inside the context from `working_s` and `working_cpu_s`.

    Compiling takes seconds, once on a machine, and must not end the searches that need the code.
    """
    began, cpu_began = time.monotonic(), time.process_time()
    try:
        yield
    finally:
        _SPENT.clock_s += time.monotonic() - began
        _SPENT.cpu_s += time.process_time() - cpu_began


def working_s() -> float:
    """Return a clock in seconds that is paused within `compiling`."""
    return time.monotonic() - _SPENT.clock_s


def working_cpu_s() -> float:
    """Return this process's processor time in seconds, without that within `compiling`."""
    return time.process_time() - _SPENT.cpu_s


def compile_function(function: Function) -> Function:
    """Return a function compiled by numba with all its callees in this package, loaded from the cache if present.

    The functions themselves stay plain Python. Only the outermost function may create arrays: in the others reference
    counting is off, because every call passes tuples of dozens of arrays, and counting their references would take many
    times as long as the work.
    """
    import numba

    for callee in _callees(function) - {function}:
        _register_callee(callee)
    config: Any = numba.config  # its names come from the environment's variables of numba
    config.CACHE_DIR = str(code_directory(function))  # read when a function is given a cache
    try:
        compiled = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no writable directory: compiled in each process
        compiled = numba.njit(nogil=True, error_model="numpy")(function)
    return cast(Function, compiled)


def compile_untimed(function: Function) -> Function:
    """Return a function that `compile_function` compiles at its first call, outside the time limits of searches."""
    with compiling():  # the import of numba takes a second
        compiled: Any = compile_function(function)

    def call(*arguments: Any) -> Any:
        with nullcontext() if compiled.signatures else compiling():
            return compiled(*arguments)

    return cast(Function, call)


def is_machine_code_cached(function: Callable[..., Any]) -> bool:
    """Return whether machine code of a function, for its current sources, is on disk."""
    name = f"{Path(function.__code__.co_filename).stem}.{function.__name__}-"
    return any(file.name.startswith(name) for file in code_directory(function).rglob("*.nbi"))


def code_directory(function: Callable[..., Any]) -> Path:
    """Return the directory of a function's machine code, named by numba's version and the sources it may depend on.

    These are all modules in the folders of the function and its callees, so that changed constants count, too.
    """
    digest = hashlib.sha256(version("numba").encode())
    for folder in sorted({str(Path(callee.__code__.co_filename).parent) for callee in _callees(function)}):
        for file in sorted(Path(folder).glob("*.py")):
            digest.update(file.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gpuprof" / f"code-{digest.hexdigest()[:20]}"


@cache
def _register_callee(function: Callable[..., Any]) -> None:
    from numba.extending import register_jitable

    register_jitable(_nrt=False, error_model="numpy", forceinline=True)(function)


def _callees(function: Callable[..., Any]) -> set[Callable[..., Any]]:
    """Return a function with its direct and indirect callees in this package."""
    functions: set[Callable[..., Any]] = set()
    waiting = [function]
    while waiting:
        caller = waiting.pop()
        if caller not in functions:
            functions.add(caller)
            waiting += _direct_callees(caller)
    return functions


def _direct_callees(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    package = function.__module__.split(".")[0]
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__module__.split(".")[0] == package:
            yield value
