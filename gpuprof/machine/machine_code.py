"""Machine code of Python functions by numba, cached on disk in a directory named by a hash of all its sources.

numba's own cache checks only the file of the outermost function: after a change of `gpuprof.rules.routing`, the old
code would still run.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = "gpuprof"


def compile_function(function: Function, **options: Any) -> Function:
    """Return a function compiled by numba with these options, loaded from the cache if present.

    Callees in other modules must be compiled already; otherwise use `compile_with_callees`.
    """
    import numba

    config: Any = numba.config  # its names come from the environment's variables of numba
    config.CACHE_DIR = str(code_directory(function))  # read when a function is given a cache
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable directory: compiled in each process
        compiled = numba.njit(**options)(function)
    return cast(Function, compiled)


def compile_with_callees(function: Function, **options: Any) -> Function:
    """Return a function compiled together with all its direct and indirect callees in this package.

    The functions themselves stay plain Python: copies of them refer to the compiled callees.
    """
    return cast(Function, _compile_with_callees(function, options, {}))


def _compile_with_callees(function: Callable[..., Any], options: dict[str, Any], done: dict[Any, Any]) -> Any:
    if function not in done:
        code, names = function.__code__, function.__globals__
        callees = {name: names[name] for name in _names(code) if isinstance(names.get(name), FunctionType)}
        compiled = {name: _compile_with_callees(callee, options, done) for name, callee in callees.items()}
        copy = FunctionType(code, {**names, **compiled}, function.__name__, function.__defaults__)
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        done[function] = compile_function(copy, **options)
    return done[function]


def is_machine_code_cached(function: Callable[..., Any]) -> bool:
    """Return whether machine code of a function's module, for its current sources, is on disk."""
    name = f"{Path(function.__code__.co_filename).stem}.{function.__name__}-"
    return any(file.name.startswith(name) for file in code_directory(function).rglob("*.nbi"))


def code_directory(function: Callable[..., Any]) -> Path:
    """Return the directory of a function's machine code.

    Its name is a hash of numba's version, of the source of the function's module and of all modules whose functions and
    named tuples are used, directly or indirectly, and of the numbers and texts in their namespaces.
    """
    digest = hashlib.sha256(version("numba").encode())
    for part in sorted(_describe_modules(_plain(function).__globals__, set())):
        digest.update(part.encode())
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gpuprof" / f"code-{digest.hexdigest()[:20]}"


def _describe_modules(names: dict[str, Any], seen: set[str]) -> Iterator[str]:
    """Yield the sources and constants of a module and of all modules used."""
    file, module = str(names.get("__file__", "")), str(names["__name__"])
    seen.add(module)
    # Copied while they are read: a module that is still being imported gains names.
    values = dict(names)
    constants = {name: value for name, value in values.items() if isinstance(value, int | float | str | tuple)}
    texts = sorted(f"{name}={value!r}" for name, value in constants.items() if not name.startswith("__"))
    yield f"{module}\n{_read_source(file)}\n{texts}"
    for value in values.values():
        used = getattr(_plain(value), "__module__", None)
        is_code = isinstance(_plain(value), FunctionType) or hasattr(value, "_fields")
        if is_code and used not in seen and str(used).split(".")[0] == _PACKAGE and used in sys.modules:
            yield from _describe_modules(vars(sys.modules[used]), seen)


@lru_cache(maxsize=256)
def _read_source(file: str) -> str:
    return Path(file).read_text(encoding="utf-8") if file and Path(file).is_file() else ""


def _plain(value: Any) -> Any:
    """Return the Python function behind a compiled function; anything else unchanged."""
    return getattr(value, "py_func", value)


def _names(code: CodeType) -> set[str]:
    inside = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inside))
