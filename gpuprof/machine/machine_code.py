"""Compiles functions with numba, and keeps the machine code on disk under all that it was compiled from.

numba itself looks at the file of the outermost function only, and at when it was written: it would go on running an old
`gpuprof.rules.routing` after that has changed, and keeps code that was loaded before a file changed as if it were the
new file's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compile_function(function: Function, **options: Any) -> Function:
    """Return a function compiled by numba with these options, loaded from where it is kept if it is.

    What it calls of other modules must be there already; what it calls of its own may be defined further down.
    """
    config: Any = numba.config
    # numba reads the directory once, when it is told to cache, so that it can be set for one function alone.
    before, config.CACHE_DIR = config.CACHE_DIR, str(code_directory(function))
    compiled: Any
    try:
        compiled = numba.njit(cache=True, **options)(function)
        _keep_if_possible(compiled)
    except RuntimeError:  # nowhere to keep it: compile anew in each process
        compiled = numba.njit(**options)(function)
    finally:
        config.CACHE_DIR = before
    return cast(Function, compiled)


def _keep_if_possible(compiled: Any) -> None:
    """Let a function run though its machine code cannot be kept.

    numba now and then has no object code to write of what links code that another process kept meanwhile, and raises
    RuntimeError then, after it has compiled.
    """
    if not hasattr(compiled, "_cache"):  # numba is told not to compile
        return
    save = compiled._cache.save_overload

    def try_to_save(signature: object, result: object) -> None:
        with suppress(RuntimeError):
            save(signature, result)

    compiled._cache.save_overload = try_to_save


def is_kept(compiled: Callable[..., Any]) -> bool:
    """Return whether machine code of a compiled function is on disk for the file that it was loaded from.

    numba keeps the code of another copy of the file, such as that of another environment, beside it and never loads it.
    """
    cache = getattr(compiled, "_cache", None)
    index = getattr(cache, "_cache_file", None)
    return index is not None and bool(index._load_index())


def code_directory(function: Callable[..., Any]) -> Path:
    """Return where to keep the machine code of a function: by its file, for what is not defined yet, and its code."""
    digest = hashlib.sha256(f"{numba.__version__} {describe_code(function)}".encode())
    source = Path(function.__code__.co_filename)
    digest.update(source.read_bytes() if source.is_file() else b"")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gpuprof" / f"code-{digest.hexdigest()[:20]}"


def describe_code(function: Callable[..., Any]) -> str:
    """Return all that the machine code of a function depends on, as it was loaded, whatever its file says by now.

    That is parameters, bytecode, literals and constants, and the same of all that it calls.
    """
    found: dict[str, str] = {}
    _describe(function, found)
    return repr(sorted(found.items()))


def _describe(function: Callable[..., Any], described: dict[str, str]) -> None:
    plain = getattr(function, "py_func", function)
    name = f"{plain.__module__}.{plain.__qualname__}"
    if name in described:
        return
    # Before its calls are followed: functions may call each other in a circle.
    described[name] = ""
    code, used = plain.__code__, []
    for one in sorted(_names(code)):
        if one in plain.__globals__:
            used.append((one, _describe_value(plain.__globals__[one], _names(code), described)))
    described[name] = repr((_code_key(code), used))


def _describe_value(value: Any, names: set[str], described: dict[str, str]) -> str:
    """Return what stands for a global; functions go to ``described``, and those of modules that are named."""
    plain = getattr(value, "py_func", value)
    if isinstance(plain, FunctionType):
        _describe(plain, described)
        return f"{plain.__module__}.{plain.__qualname__}"
    if isinstance(value, ModuleType):
        inside = sorted(name for name in names if hasattr(value, name)) if value.__name__.startswith("gpuprof") else []
        return f"{value.__name__} {[_describe_value(getattr(value, name), set(), described) for name in inside]}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__} {getattr(value, '_fields', ())}"
    said = repr(value)
    # An address differs in every process, and nothing would ever be found again.
    return type(value).__name__ if " at 0x" in said else said


def _names(code: CodeType) -> set[str]:
    inside = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inside))


def _code_key(code: CodeType) -> tuple[object, ...]:
    consts = tuple(_code_key(const) if isinstance(const, CodeType) else repr(const) for const in code.co_consts)
    return code.co_varnames, code.co_argcount, code.co_code.hex(), consts, code.co_names
