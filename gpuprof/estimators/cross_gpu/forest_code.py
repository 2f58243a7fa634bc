"""Trees walked row by row, in LLVM's own language: llvmlite compiles it in 40 ms where loading numba takes 0.7 s."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: ``AddLeaves(rows, feature, threshold, left, right, leaves, sums)``, arrays as in `forest.Forest`.
AddLeaves = Callable[[Array, Array, Array, Array, Array, Array, Array], None]

_TYPES = (np.float64, np.int32, np.float64, np.int32, np.int32, np.float64, np.float64)


def compile_add_leaves() -> AddLeaves:
    """Return the compiled loop, which holds no lock of the interpreter.

    Raises `RuntimeError` when LLVM is older than pointers without types, or cannot compile for this machine.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    code = files("gpuprof") / "estimators" / "cross_gpu" / "forest.ll"
    module = llvm.parse_assembly(code.read_text(encoding="utf-8"))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(_TYPES), *[ctypes.c_int64] * 5)(
        engine.get_function_address("add_leaves")
    )

    def add_leaves(*arrays: Array, _engine: object = engine) -> None:  # the machine code lives as long as its engine
        for array, kind in zip(arrays, _TYPES, strict=True):
            if array.dtype != kind or not array.flags.c_contiguous:
                raise TypeError(f"an array of the trees must be contiguous {kind.__name__} but is {array.dtype}")
        rows, feature, leaves = arrays[0], arrays[1], arrays[5]
        call(*(one.ctypes.data for one in arrays), *rows.shape, *feature.shape, leaves.shape[1])

    return add_leaves
