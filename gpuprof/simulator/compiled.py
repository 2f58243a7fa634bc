"""Compiles functions with numba, and keeps the machine code on disk."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import numba

from gpuprof.rules import batching, routing

Function = TypeVar("Function", bound=Callable[..., Any])

# Nothing that is compiled here makes an array, so that references need not be counted: with the named tuples of dozens
# of arrays that go into every call, the counting would take four times as long as the work.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "_nrt": False,
    "forceinline": True,
    "no_cfunc_wrapper": True,
}

_COMPILED = ("choice", "compiled", "failing", "heap", "histogram", "host", "kernel", "ranking", "slowdown", "state")


def jit(function: Function) -> Function:
    """Return ``function`` compiled, the machine code kept on disk.

    Compiled code is kept apart by the source of everything that is compiled together: numba itself looks only at the
    file of the outermost function, and would go on running an old rule after `gpuprof.rules.routing` has changed.
    """
    config: Any = numba.config
    compiled: Any
    before = config.CACHE_DIR
    config.CACHE_DIR = str(_cache_directory())
    try:
        compiled = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # nowhere to keep it: compile anew in each process
        compiled = numba.njit(**_OPTIONS)(function)
    finally:
        config.CACHE_DIR = before
    return cast(Function, compiled)


def is_compiled() -> bool:
    """Return whether machine code of this version is kept already, so that nothing needs to be compiled."""
    return any(_cache_directory().rglob("kernel.run-*.nbc"))


@cache
def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gpuprof" / f"compiled-{_source_hash()}"


def _source_hash() -> str:
    digest = hashlib.sha256()
    for module in (batching, routing):
        digest.update(_source(module))
    for name in _COMPILED:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def _source(module: ModuleType) -> bytes:
    return inspect.getsource(module).encode()
