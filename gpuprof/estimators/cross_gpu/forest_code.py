"""Trees walked row by row, in LLVM's own language: llvmlite compiles it in 40 ms where loading numba takes 0.7 s."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: ``AddLeaves(rows, feature, threshold, left, right, leaves, sums)``, arrays as in `forest.Forest`.
AddLeaves = Callable[[Array, Array, Array, Array, Array, Array, Array], None]

# What `forest_kernel._add_leaves` does, with the same comparison and the same order of additions.
_CODE = """
define void @add_leaves(ptr %rows, ptr %feature, ptr %threshold, ptr %left, ptr %right, ptr %leaves, ptr %sums,
                        i64 %count, i64 %width, i64 %trees, i64 %splits, i64 %most) {
entry:
  br label %next_tree
next_tree:
  %tree = phi i64 [ 0, %entry ], [ %tree_after, %tree_done ]
  %is_tree = icmp slt i64 %tree, %trees
  br i1 %is_tree, label %first_row, label %done
first_row:
  %first_split = mul i64 %tree, %splits
  %first_leaf = mul i64 %tree, %most
  br label %next_row
next_row:
  %row = phi i64 [ 0, %first_row ], [ %row_after, %fallen ]
  %is_row = icmp slt i64 %row, %count
  br i1 %is_row, label %top, label %tree_done
top:
  %first_value = mul i64 %row, %width
  br label %walk
walk:
  %node = phi i64 [ 0, %top ], [ %child, %walk ]
  %at = add i64 %first_split, %node
  %feature_at = getelementptr i32, ptr %feature, i64 %at
  %column = load i32, ptr %feature_at
  %column_long = sext i32 %column to i64
  %value_place = add i64 %first_value, %column_long
  %value_at = getelementptr double, ptr %rows, i64 %value_place
  %value = load double, ptr %value_at
  %threshold_at = getelementptr double, ptr %threshold, i64 %at
  %limit = load double, ptr %threshold_at
  %below = fcmp ole double %value, %limit
  %left_at = getelementptr i32, ptr %left, i64 %at
  %right_at = getelementptr i32, ptr %right, i64 %at
  %left_child = load i32, ptr %left_at
  %right_child = load i32, ptr %right_at
  %child_short = select i1 %below, i32 %left_child, i32 %right_child
  %child = sext i32 %child_short to i64
  %is_split = icmp sge i64 %child, 0
  br i1 %is_split, label %walk, label %fallen
fallen:
  %leaf = sub i64 -1, %child
  %leaf_place = add i64 %first_leaf, %leaf
  %leaf_at = getelementptr double, ptr %leaves, i64 %leaf_place
  %more = load double, ptr %leaf_at
  %sum_at = getelementptr double, ptr %sums, i64 %row
  %before = load double, ptr %sum_at
  %sum = fadd double %before, %more
  store double %sum, ptr %sum_at
  %row_after = add i64 %row, 1
  br label %next_row
tree_done:
  %tree_after = add i64 %tree, 1
  br label %next_tree
done:
  ret void
}
"""
_TYPES = (np.float64, np.int32, np.float64, np.int32, np.int32, np.float64, np.float64)


def compile_add_leaves() -> AddLeaves:
    """Return the compiled loop, which holds no lock of the interpreter.

    Raises `RuntimeError` when LLVM is older than pointers without types, or cannot compile for this machine.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_CODE)
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
