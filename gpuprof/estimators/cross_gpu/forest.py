"""Trees that LightGBM learned, read from its own text format and evaluated with numpy.

Importing LightGBM takes longer than a whole answer may. Only what gpuprof trains is read: numeric splits without
missing values, a sum of trees; anything else is refused. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.errors import InputError

_MAX_TREES = 5000
_MAX_LEAVES = 4096
_CATEGORICAL = 1


@dataclass(frozen=True, slots=True)
class Forest:
    """A sum of T binary trees, each padded to as many nodes.

    Attributes
    ----------
    feature, threshold, left, right : ndarray of shape (T, S)
        Splits: values not above the threshold go left; a child below zero is leaf ``-child - 1``.
    leaves : ndarray of shape (T, L)
    depth : int
        Of the deepest tree.
    features : int
    """

    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    leaves: NDArray[np.float64]
    depth: int
    features: int

    def predict(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sums of the leaves that each row falls into.

        Parameters
        ----------
        rows : ndarray of shape (N, F)

        Returns
        -------
        ndarray of shape (N,)
        """
        count, trees = len(rows), np.arange(len(self.feature))
        node = np.zeros((count, len(trees)), dtype=np.int64)
        samples = np.arange(count)[:, None]
        for _ in range(self.depth):
            at = np.maximum(node, 0)
            below = rows[samples, self.feature[trees, at]] <= self.threshold[trees, at]
            child = np.where(below, self.left[trees, at], self.right[trees, at])
            node = np.where(node < 0, node, child)
            if (node < 0).all():
                break
        return np.asarray(self.leaves[trees, -node - 1].sum(axis=1))


def read_forest(text: str, name: str) -> Forest:
    """Return the forest that a LightGBM model file holds.

    Raises
    ------
    InputError
        When the file is damaged or holds what gpuprof does not train.
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
        return {"feature": [0], "threshold": [0.0], "left": [-1], "right": [-1], "leaves": leaves, "depth": 1}
    tree: dict[str, Any] = {
        "feature": _integers(entries["split_feature"]),
        "threshold": _floats(entries["threshold"]),
        "left": _integers(entries["left_child"]),
        "right": _integers(entries["right_child"]),
        "leaves": leaves,
    }
    if any(kind & _CATEGORICAL for kind in _integers(entries["decision_type"])):
        raise ValueError("categorical splits")
    if not all(len(tree[part]) == count - 1 for part in ("feature", "threshold", "left", "right")):
        raise ValueError("splits and leaves do not agree")
    if not all(0 <= feature < features for feature in tree["feature"]):
        raise ValueError("a feature that it has not")
    return {**tree, "depth": _depth(tree["left"], tree["right"], count)}


def _depth(left: list[int], right: list[int], leaves: int) -> int:
    """Return how deep a tree is, which is a tree only if each child has a larger number than its parent."""
    depth = [1] * len(left)
    for node, children in enumerate(zip(left, right, strict=True)):
        for child in children:
            if not -leaves <= child < len(left) or 0 <= child <= node:
                raise ValueError(f"node {node} has the child {child}")
            if child > 0:
                depth[child] = depth[node] + 1
    return max(depth)


def _pad_trees(trees: list[dict[str, Any]], features: int) -> Forest:
    splits, leaves = max(len(tree["left"]) for tree in trees), max(len(tree["leaves"]) for tree in trees)

    def pad(part: str, length: int, dtype: type) -> NDArray[Any]:
        filled: NDArray[Any] = np.zeros((len(trees), length), dtype=dtype)
        for row, tree in enumerate(trees):
            filled[row, : len(tree[part])] = tree[part]
        return filled

    return Forest(
        pad("feature", splits, np.int64),
        pad("threshold", splits, np.float64),
        pad("left", splits, np.int64),
        pad("right", splits, np.int64),
        pad("leaves", leaves, np.float64),
        max(tree["depth"] for tree in trees),
        features,
    )


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _floats(text: str) -> list[float]:
    return [float(word) for word in text.split()]
