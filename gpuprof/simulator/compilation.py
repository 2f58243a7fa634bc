"""Compiles the functions of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gpuprof.machine.machine_code import compile_function

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


def jit(function: Function) -> Function:
    """Return ``function`` compiled, the machine code kept on disk."""
    return compile_function(function, **_OPTIONS)
