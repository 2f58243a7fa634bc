"""How many threads the libraries of linear algebra may use."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def blas_threads() -> Any:
    """Return what limits the threads of the libraries that are loaded by now."""
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()
