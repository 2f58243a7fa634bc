"""How a model was executed when it was measured: by which runtime, fused or op by op, and in which arithmetic.

Times of one model by two runtimes, or in float32 and in TF32, differ by factors. They are figures of two things, and
nothing is interpolated between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

#: Precisions that the same float32 model can be computed in.
_OF_FLOAT32 = frozenset({"float32", "tf32"})
#: What `gpuprof serve` runs where it can: its figures are preferred.
SERVED_BY = "onnxruntime"


@dataclass(frozen=True, slots=True)
class RuntimeVariant:
    """A way to execute a model; None: not known.

    Examples
    --------
    >>> str(RuntimeVariant("onnxruntime", "fused", "tf32"))
    'onnxruntime fused tf32'
    >>> str(RuntimeVariant())
    'an unknown runtime'
    """

    runtime: str | None = None  #: ``"onnxruntime"``, ``"pytorch"``, ``"tensorrt"``, …
    #: ``"fused"``: the runtime's optimizer merges ops; ``"eager"``: each op is launched by itself.
    execution: str | None = None
    precision: str | None = None  #: Of most of the arithmetic: ``"float32"``, ``"tf32"``, ``"float16"``, ``"int8"``, …

    def __str__(self) -> str:
        said = [part for part in (self.runtime, self.execution, self.precision) if part is not None]
        return " ".join(said) or "an unknown runtime"

    def is_comparable(self, other: RuntimeVariant) -> bool:
        """Return whether figures of different models by both may stand in one fit.

        Models may differ in their types, as float16 and float32, but not in how the same float32 is computed.
        """
        mixed = {self.precision, other.precision} == _OF_FLOAT32
        return (self.runtime, self.execution) == (other.runtime, other.execution) and not mixed


class ExecutedRow(Protocol):
    """A row of the kernel database that says how its model was executed."""

    @property
    def runtime(self) -> str | None: ...  # noqa: D102 - see `RuntimeVariant`

    @property
    def execution(self) -> str | None: ...  # noqa: D102

    @property
    def precision(self) -> str | None: ...  # noqa: D102


_Row = TypeVar("_Row", bound=ExecutedRow)


def variant_of(row: ExecutedRow) -> RuntimeVariant:
    """Return the variant that a row of the kernel database is of."""
    return RuntimeVariant(row.runtime, row.execution, row.precision)


def rank_variants(variants: Iterable[RuntimeVariant]) -> tuple[RuntimeVariant, ...]:
    """Return the distinct variants, the preferred one first.

    Known runtimes come before unknown ones, ONNX Runtime, which serves, before others, then those with more figures.
    """
    counts = Counter(variants)

    def key(variant: RuntimeVariant) -> tuple[object, ...]:
        return variant.runtime is None, variant.runtime != SERVED_BY, -counts[variant], str(variant)

    return tuple(sorted(counts, key=key))


def comparable_rows(rows: Sequence[_Row]) -> list[_Row]:
    """Return those of one device's rows that may be used in one fit: of the first variant and comparable ones."""
    variants = [variant_of(row) for row in rows]
    ranked = rank_variants(variants)
    return [row for row, variant in zip(rows, variants, strict=True) if variant.is_comparable(ranked[0])]
