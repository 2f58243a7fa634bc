"""Machine code of Python functions by numba, kept on disk in a directory named by all sources that it is made from.

numba's own cache looks at the file of the outermost function alone: it would go on running an old
`gpuprof.rules.routing` after that has changed.
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
    """Return a function compiled by numba with these options, loaded from the cache where it is there.

    Functions of other modules that it calls must be compiled already; see `compile_with_callees` for those that are
    not.
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
    """Return a function compiled together with all functions of this package that it calls, however deep.

    The functions themselves stay plain Python: they are copied with their compiled callees in their place.
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
    """Return whether machine code of a function's module, as its sources are now, is on disk."""
    name = f"{Path(function.__code__.co_filename).stem}.{function.__name__}-"
    return any(file.name.startswith(name) for file in code_directory(function).rglob("*.nbi"))


def code_directory(function: Callable[..., Any]) -> Path:
    """Return where to keep the machine code of a function.

    The name is a hash of the source of its module and of those whose functions and named tuples that module uses,
    however deep, of the numbers and texts that they have imported, and of numba's version.
    """
    digest = hashlib.sha256(version("numba").encode())
    for part in sorted(_describe_modules(_plain(function).__globals__, set())):
        digest.update(part.encode())
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gpuprof" / f"code-{digest.hexdigest()[:20]}"


def _describe_modules(names: dict[str, Any], seen: set[str]) -> Iterator[str]:
    """Yield the sources and the constants of a module and of those that it uses."""
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
    """Return the Python function that was compiled; anything else as it is."""
    return getattr(value, "py_func", value)


def _names(code: CodeType) -> set[str]:
    inside = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inside))
