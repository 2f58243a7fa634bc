"""Trees that LightGBM learned, read from its own text format and evaluated by a compiled loop.

Importing LightGBM takes longer than a whole answer may, and numba a third of one. Only what gpuprof trains is read:
numeric splits without missing values, a sum of trees; anything else is refused. A test compares the two.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.estimators.cross_gpu.forest_code import AddLeaves

_MAX_TREES = 5000
_MAX_LEAVES = 4096
_CATEGORICAL = 1
#: Rows that keep a thread busy for some milliseconds: fewer are not worth starting one for.
_THREAD_ROWS = 1000


@dataclass(frozen=True, slots=True)
class Forest:
    """A sum of T binary trees, each padded to as many nodes."""

    #: ``feature``, ``threshold``, ``left``, ``right``: Shape (T, S). Splits: values not above the threshold go left; a
    #: child below zero is leaf ``-child - 1``.
    feature: NDArray[np.int32]
    threshold: NDArray[np.float64]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    leaves: NDArray[np.float64]  #: Shape (T, L).
    features: int

    def predict(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sums of the leaves that each row falls into, added in the order of the trees as LightGBM does.

        Parameters
        ----------
        rows : ndarray of shape (N, F)

        Returns
        -------
        ndarray of shape (N,)
        """
        values = np.ascontiguousarray(rows, dtype=np.float64)
        add_leaves, sums = _load_add_leaves(), np.zeros(len(values))

        def add(part: slice) -> None:
            add_leaves(values[part], self.feature, self.threshold, self.left, self.right, self.leaves, sums[part])

        workers = min(len(os.sched_getaffinity(0)), len(rows) // _THREAD_ROWS)
        if workers < 2:
            add(slice(None))
            return sums
        size = math.ceil(len(rows) / workers)
        with ThreadPoolExecutor(workers) as threads:  # the loop holds no lock of the interpreter
            list(threads.map(add, (slice(start, start + size) for start in range(0, len(rows), size))))
        return sums


@dataclass(frozen=True, slots=True)
class ForestTexts(Mapping[str, Forest]):
    """Forests by name, each read when it is first asked for: an answer needs few of those that ship."""

    texts: Mapping[str, str]
    _read: dict[str, Forest] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Forest:
        """Return a forest. Raises `InputError` as `read_forest` does."""
        if name not in self._read:
            self._read[name] = read_forest(self.texts[name], name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.texts)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.texts)


@cache
def _load_add_leaves() -> AddLeaves:
    """Return the loop as LLVM compiles it, or as numba does, whose import takes long, where LLVM is too old."""
    try:
        from gpuprof.estimators.cross_gpu.forest_code import compile_add_leaves

        return compile_add_leaves()
    except (ImportError, RuntimeError):
        from gpuprof.estimators.cross_gpu.forest_kernel import add_leaves

        return add_leaves


def read_forest(text: str, name: str) -> Forest:
    """Return the forest that a LightGBM model file holds.

    Raises `InputError` when the file is damaged or holds what gpuprof does not train.
    """
    try:
        head, *trees = text.split("\nTree=")
        features = int(_entries(head)["max_feature_idx"]) + 1
        parsed = [_tree(_entries(tree.split("\nend of trees")[0]), features) for tree in trees]
        if not 0 < len(parsed) <= _MAX_TREES:
            raise ValueError(f"{len(parsed)} trees")
        return _pad_trees(parsed, features)
    except (KeyError, ValueError, IndexError) as error:
        raise InputError(f"{name} is no regressor that gpuprof trained: {error}", "reinstall gpuprof") from None


def _entries(text: str) -> Mapping[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _tree(entries: Mapping[str, str], features: int) -> dict[str, Any]:
    leaves = _floats(entries["leaf_value"])
    count = int(entries["num_leaves"])
    if len(leaves) != count or count > _MAX_LEAVES:
        raise ValueError(f"{len(leaves)} leaves where {count} are said")
    if count == 1:  # a constant: a split that goes to the only leaf either way
        return {"feature": [0], "threshold": [0.0], "left": [-1], "right": [-1], "leaves": leaves}
    tree: dict[str, Any] = {
        "feature": _integers(entries["split_feature"]),
        "threshold": _floats(entries["threshold"]),
        "left": _integers(entries["left_child"]),
        "right": _integers(entries["right_child"]),
        "leaves": leaves,
    }
    if any(kind & _CATEGORICAL for kind in set(_integers(entries["decision_type"]))):
        raise ValueError("categorical splits")
    if not all(len(tree[part]) == count - 1 for part in ("feature", "threshold", "left", "right")):
        raise ValueError("splits and leaves do not agree")
    if not 0 <= min(tree["feature"]) <= max(tree["feature"]) < features:
        raise ValueError("a feature that it has not")
    _check_children(tree["left"], tree["right"], count)
    return tree


def _check_children(left: list[int], right: list[int], leaves: int) -> None:
    """Refuse what is no tree: each child has a larger number than its parent."""
    # The compiled loop checks nothing: it would go round for ever, or read beyond its arrays.
    for node, children in enumerate(zip(left, right, strict=True)):
        for child in children:
            if not (-leaves <= child < 0 or node < child < len(left)):
                raise ValueError(f"node {node} has the child {child}")


def _pad_trees(trees: list[dict[str, Any]], features: int) -> Forest:
    splits, leaves = max(len(tree["left"]) for tree in trees), max(len(tree["leaves"]) for tree in trees)

    def pad(part: str, length: int, dtype: type) -> NDArray[Any]:
        filled: NDArray[Any] = np.zeros((len(trees), length), dtype=dtype)
        for row, tree in enumerate(trees):
            filled[row, : len(tree[part])] = tree[part]
        return filled

    return Forest(
        pad("feature", splits, np.int32),
        pad("threshold", splits, np.float64),
        pad("left", splits, np.int32),
        pad("right", splits, np.int32),
        pad("leaves", leaves, np.float64),
        features,
    )


def _integers(text: str) -> list[int]:
    return list(map(int, text.split()))


def _floats(text: str) -> list[float]:
    return list(map(float, text.split()))
