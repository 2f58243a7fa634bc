"""Which estimates were held against measurements, from ``datasets/cross_gpu/compared.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache

from gpuprof.domain.catalogue import datasets
from gpuprof.estimators.cross_gpu.kernels import LaunchMode
from gpuprof.estimators.cross_gpu.rates import TENSOR_TYPES

#: Source of a figure that no measurement was held against.
NEVER_COMPARED = "never compared"

_Key = tuple[str, str, str]


def list_compared_boards(runtime: LaunchMode, precision: str, kind: str) -> frozenset[str]:
    """Return the boards on which such estimates were compared; ``kind``: of the model, as `cross_gpu.kind_of`.

    Where networks have no attention, or attention is never fused, its fusion makes no difference.
    """
    return _read_compared().get(_make_key(runtime, precision, kind.partition(" ")[0]), frozenset())


def describe_evidence(boards: frozenset[str], board: str) -> str | None:
    """Return in words that nothing was compared on a board, or on none; None where it was."""
    if board in boards:
        return None
    return f"{NEVER_COMPARED} on this board" if boards else NEVER_COMPARED


@cache
def _read_compared() -> Mapping[_Key, frozenset[str]]:
    content = (datasets() / "cross_gpu" / "compared.toml").read_text(encoding="utf-8")
    compared: dict[_Key, frozenset[str]] = {}
    for entry in tomllib.loads(content)["compared"]:
        key = _make_key(LaunchMode(entry["runtime"]), entry["precision"], entry["family"])
        compared[key] = compared.get(key, frozenset()) | set(entry["boards"])
    return compared


def _make_key(runtime: LaunchMode, precision: str, family: str) -> _Key:
    fuses = precision in TENSOR_TYPES - {"tfloat32"} and family == "products"
    return (runtime if fuses else runtime.partition(":")[0]), precision, family
