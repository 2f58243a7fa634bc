"""Which dimension of a model's inputs is the batch, by what the dimensions are called."""

from __future__ import annotations

import re
from collections.abc import Mapping

# "n" and "bs" only as words of their own, "batch" anywhere, as in "batch_size".
_BATCH = re.compile(r"(^|[^a-z])(bs|n)([^a-z]|$)|batch", re.IGNORECASE)
_NOT_BATCH = re.compile(r"seq|len|time|height|width|past|token|channel", re.IGNORECASE)
_LENGTH = re.compile(r"seq|len|token", re.IGNORECASE)
#: Red, green, blue and transparency: a second or last dimension this small is of an image.
_MOST_COLOURS = 4
#: A dimension: its size, its name, or None where it is free and has no name.
Dim = int | str | None


def is_batch(name: str) -> bool:
    """Tell whether a dimension is named like a batch."""
    return _BATCH.search(name) is not None


def batch_axes(inputs: Mapping[str, tuple[Dim, ...]]) -> dict[str, int]:
    """Return for each input with a free batch dimension the position of that dimension.

    A dimension named like a batch is one wherever it stands, and so is a ``B`` that every input has; else the first
    one, if it is free and not named like a sequence or a side. Where another input names its batch, the first one
    counts if images or sequences follow it, as ``[images, 3, 224, 224]`` beside ``[batch, sequence]``. Inputs without
    either, and models with a fixed batch, are absent.
    """
    named = {
        name: axis
        for name, dims in inputs.items()
        for axis, dim in reversed(list(enumerate(dims)))
        if isinstance(dim, str) and dim.isidentifier() and is_batch(dim)
    }
    named = named or _find_letter_b(inputs)
    others = bool(named)
    for name, dims in inputs.items():
        first = dims[0] if dims else 0
        open_first = isinstance(first, str) and not _NOT_BATCH.search(first)
        if name not in named and (first is None or (open_first and (not others or _holds_items(dims)))):
            named[name] = 0
    return named


def _find_letter_b(inputs: Mapping[str, tuple[Dim, ...]]) -> dict[str, int]:
    """Return where each input has the dimension ``B``; nothing where one lacks it, or has an ``A``, too."""
    shapes = {name: [str(dim).upper() for dim in dims] for name, dims in inputs.items() if dims}
    if not shapes or any("B" not in dims or "A" in dims for dims in shapes.values()):
        return {}
    return {name: dims.index("B") for name, dims in shapes.items()}


def _holds_items(dims: tuple[Dim, ...]) -> bool:
    """Tell whether images or sequences follow the first dimension."""
    if len(dims) == 4:
        colours = (dims[1], dims[-1])
        return any(isinstance(size, int) and size <= _MOST_COLOURS for size in colours) or "chann" in str(dims[1])
    return len(dims) == 2 and isinstance(dims[1], str) and _LENGTH.search(dims[1]) is not None
