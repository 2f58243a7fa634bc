"""Which dimension of a model's inputs is the batch, by what the dimensions are called."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BATCH = re.compile(r"(^|[^a-z])(batch|bs|n)([^a-z]|$)|batch", re.IGNORECASE)
_NOT_BATCH = re.compile(r"seq|len|time|height|width|past|token|channel", re.IGNORECASE)
#: A dimension: its size, its name, or None where it is free and has no name.
Dim = int | str | None


def is_batch(name: str) -> bool:
    """Tell whether a dimension is named like a batch."""
    return _BATCH.search(name) is not None


def batch_axes(inputs: Mapping[str, tuple[Dim, ...]]) -> dict[str, int]:
    """Return for each input with a free batch dimension the position of that dimension.

    A dimension named like a batch is one wherever it stands; else the first one, if it is free and not named like
    a sequence or a side. Inputs without either, and models with a fixed batch, are absent.
    """
    named = {
        name: axis
        for name, dims in inputs.items()
        for axis, dim in reversed(list(enumerate(dims)))
        if isinstance(dim, str) and dim.isidentifier() and is_batch(dim)
    }
    for name, dims in inputs.items():
        first = dims[0] if dims else 0
        unnamed = first is None or (isinstance(first, str) and not named and not _NOT_BATCH.search(first))
        if name not in named and unnamed:
            named[name] = 0
    return named
