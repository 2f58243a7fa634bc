"""Detection of the batch dimension of a model's inputs by the names of dimensions."""

from __future__ import annotations

import re
from collections.abc import Mapping

# "n" and "bs" only as separate words, "batch" anywhere, as in "batch_size".
_BATCH = re.compile(r"(^|[^a-z])(bs|n)([^a-z]|$)|batch", re.IGNORECASE)
_NOT_BATCH = re.compile(r"seq|len|time|height|width|past|token|channel", re.IGNORECASE)
_LENGTH = re.compile(r"seq|len|token", re.IGNORECASE)
#: Most channels of an image (red, green, blue, alpha), in its second or last dimension.
_MOST_COLOURS = 4
#: A dimension: its size, its name, or None for a free dimension without a name.
Dim = int | str | None


def is_batch(name: str) -> bool:
    """Return whether a dimension is named like a batch."""
    return _BATCH.search(name) is not None


def batch_axes(inputs: Mapping[str, tuple[Dim, ...]]) -> dict[str, int]:
    """Return the position of the free batch dimension of each input that has such a dimension.

    The batch is a dimension named like a batch at any position, or a ``B`` common to all inputs; else the first
    dimension, if free and not named like a sequence or a side. Where another input names its batch, the first dimension
    must also be followed by images or sequences, as in ``[images, 3, 224, 224]`` with ``[batch, sequence]``. Other
    inputs, and models with a fixed batch, are absent.
    """
    axes = {
        name: axis
        for name, dims in inputs.items()
        for axis, dim in reversed(list(enumerate(dims)))
        if isinstance(dim, str) and dim.isidentifier() and is_batch(dim)
    }
    axes = axes or _find_letter_b(inputs)
    has_named = bool(axes)
    for name, dims in inputs.items():
        first = dims[0] if dims else 0
        open_first = isinstance(first, str) and not _NOT_BATCH.search(first)
        if name not in axes and (first is None or (open_first and (not has_named or _holds_items(dims)))):
            axes[name] = 0
    return axes


def _find_letter_b(inputs: Mapping[str, tuple[Dim, ...]]) -> dict[str, int]:
    """Return the position of ``B`` in each input; empty where an input lacks a ``B``, or has an ``A``, too."""
    shapes = {name: [str(dim).upper() for dim in dims] for name, dims in inputs.items() if dims}
    if not shapes or any("B" not in dims or "A" in dims for dims in shapes.values()):
        return {}
    return {name: dims.index("B") for name, dims in shapes.items()}


def _holds_items(dims: tuple[Dim, ...]) -> bool:
    """Return whether images or sequences follow the first dimension."""
    if len(dims) == 4:
        colours = (dims[1], dims[-1])
        return any(isinstance(size, int) and size <= _MOST_COLOURS for size in colours) or "chann" in str(dims[1])
    return len(dims) == 2 and isinstance(dims[1], str) and _LENGTH.search(dims[1]) is not None
