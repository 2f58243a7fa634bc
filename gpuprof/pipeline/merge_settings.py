"""Settings of merging."""

from __future__ import annotations

from typing import ClassVar

from gpuprof.domain.validation import Positive
from gpuprof.pipeline.settings import Dims, Settings, option

_SIZES = "Dimensions and batches"


class MergeSettings(Settings):
    """Similarity of operators, weights and outputs, and the models' input sizes."""

    title: ClassVar[str] = "Similarity and tolerance"

    omega: float = option(0.4, "Least similarity of operators to merge.")
    tolerance: Positive | None = option(
        None, "Largest relative difference of an output.", shown_default="1e-4, for float16 4e-3"
    )
    weight_tolerance: float = option(1e-7, "Largest difference of weights that count as the same.")
    eps: float = option(
        0.25,
        "Largest edit distance of two architectures, per op and edge; beyond 7 ops an upper bound of it (assignment of "
        "Riesen and Bunke).",
    )
    dims: Dims | None = option(
        None, "Size of a free dimension: NAME=SIZE; may be repeated.", "--dim", repeated=True, panel=_SIZES
    )
    batches: Dims | None = option(
        None, "Batch that a model will run at: NAME=SIZE; may be repeated.", "--batch", repeated=True, panel=_SIZES
    )
    force: bool = option(False, "Merge what is predicted to cost time, too.")
