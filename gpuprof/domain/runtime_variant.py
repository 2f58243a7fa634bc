"""Execution variants of measurements: runtime, fused or eager execution, and precision.

Times of the same model in two runtimes, or in float32 and TF32, differ by factors, so figures of different variants are
never interpolated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

#: Arithmetic precisions of a float32 model.
_OF_FLOAT32 = frozenset({"float32", "tf32"})
#: Preferred runtime of `gpuprof serve`, whose figures are preferred too.
SERVED_BY = "onnxruntime"


#: Options of sessions on a GPU, in `RuntimeVariant.execution`, under which a model has a plan for several batch sizes.
GRAPHS, SESSIONS = "graphs", "sessions"


class Padding(StrEnum):
    """Size to which a replica pads partial batches."""

    NONE = "none"
    POWERS_OF_TWO = "powers of two"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class RuntimeVariant:
    """Execution variant of a model; None: unknown.

    Examples
    --------
    >>> str(RuntimeVariant("onnxruntime", "fused", "tf32"))
    'onnxruntime fused tf32'
    >>> str(RuntimeVariant())
    'an unknown runtime'
    """

    runtime: str | None = None  #: ``"onnxruntime"``, ``"pytorch"``, ``"tensorrt"``, …
    #: ``"fused"``: the runtime's optimizer merges ops; ``"eager"``: each op is launched by itself. On a GPU followed by
    #: the options of `gpuprof.runtime.gpu_session`: ``"fused+channels-last+pinned+graphs"``.
    execution: str | None = None
    precision: str | None = None  #: Main arithmetic: ``"float32"``, ``"tf32"``, ``"float16"``, ``"int8"``, …

    def __str__(self) -> str:
        parts = [part for part in (self.runtime, self.execution, self.precision) if part is not None]
        return " ".join(parts) or "an unknown runtime"

    @property
    def has_size_classes(self) -> bool:
        """Whether batches of several sizes ran without rebuilding plans in between."""
        return not {GRAPHS, SESSIONS}.isdisjoint((self.execution or "").split("+"))

    def is_comparable(self, variant: RuntimeVariant) -> bool:
        """Return whether figures of two variants may enter the same fit.

        Models may differ in element type (float16, float32), but not in the precision of float32 arithmetic.
        """
        mixed = {self.precision, variant.precision} == _OF_FLOAT32
        return (self.runtime, self.execution) == (variant.runtime, variant.execution) and not mixed


class ExecutedRow(Protocol):
    """A row of the kernel database with its execution variant."""

    @property
    def runtime(self) -> str | None: ...  # noqa: D102 - see `RuntimeVariant`

    @property
    def execution(self) -> str | None: ...  # noqa: D102

    @property
    def precision(self) -> str | None: ...  # noqa: D102


_Row = TypeVar("_Row", bound=ExecutedRow)


def variant_of(row: ExecutedRow) -> RuntimeVariant:
    """Return the execution variant of a row of the kernel database."""
    return RuntimeVariant(row.runtime, row.execution, row.precision)


def rank_variants(variants: Iterable[RuntimeVariant]) -> tuple[RuntimeVariant, ...]:
    """Return the distinct variants, the preferred variant first.

    Known runtimes precede unknown ones, ONNX Runtime (used for serving) precedes others, then more figures precede
    fewer.
    """
    counts = Counter(variants)

    def key(variant: RuntimeVariant) -> tuple[object, ...]:
        return variant.runtime is None, variant.runtime != SERVED_BY, -counts[variant], str(variant)

    return tuple(sorted(counts, key=key))


def comparable_rows(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows of a device usable in the same fit: rows comparable with the preferred variant."""
    variants = [variant_of(row) for row in rows]
    ranked = rank_variants(variants)
    return [row for row, variant in zip(rows, variants, strict=True) if variant.is_comparable(ranked[0])]
