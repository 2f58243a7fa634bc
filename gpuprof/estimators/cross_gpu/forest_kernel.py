"""Trees walked row by row, compiled by numba."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from gpuprof.machine.machine_code import compile_function

_Array = NDArray[Any]


def _add_leaves(
    rows: _Array, feature: _Array, threshold: _Array, left: _Array, right: _Array, leaves: _Array, sums: _Array
) -> None:
    for tree in range(feature.shape[0]):  # one tree is small enough to stay in the cache for all rows
        for row in range(rows.shape[0]):
            node = 0
            while node >= 0:
                below = rows[row, feature[tree, node]] <= threshold[tree, node]
                node = left[tree, node] if below else right[tree, node]
            sums[row] += leaves[tree, -node - 1]


#: Adds to ``sums`` the leaves of a `gpuprof.estimators.cross_gpu.forest.Forest` that each row falls into, tree by tree.
add_leaves = compile_function(_add_leaves, nogil=True, error_model="numpy", _nrt=False, no_cfunc_wrapper=True)
