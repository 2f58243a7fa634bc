"""Controls the number of threads of linear algebra libraries."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def blas_threads() -> Any:
    """Return a controller of the threads of all loaded libraries."""
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()
