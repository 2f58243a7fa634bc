"""Intervals of times on GPUs that nobody measured, from the errors on GPUs that were left out.

Each kind of op has an error that nine of ten ops kept within on GPUs left out (its scale, a logarithm). A conformal
factor says how many scales hold nine of ten ops of one GPU more; another, by kind of model, how many of the mean scale
of a model's kernels hold its time, since the errors of its ops cancel in part. What the host takes has a scale of its
own. `bench.unseen_intervals` fits all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.estimators.cross_gpu.features import attention_kinds
from gpuprof.estimators.cross_gpu.node_groups import RECURRENT
from gpuprof.estimators.cross_gpu.op_table import FAMILIES, Array, OpTable

_VOLTA = 7.0
_OLD = " old"
_FLOORS = {"batched product": "bmm", "conv": "conv", "norm": "layer norm", "softmax": "softmax"}
_FLOORS |= {"elementwise": "element-wise"}
#: Op types like none that was measured → how many times as long as predicted they may take, a guess: recurrent layers
#: of a runtime may stay on the GPU for all steps or launch several kernels in each; sums of products, scattering and
#: sampling depend on how they are written and on the data; sorting, counting and control flow make the host wait.
_UNLIKE_MEASURED = dict.fromkeys(
    (*RECURRENT, "Einsum", "Scatter", "ScatterElements", "ScatterND", "GridSample", "DeformConv", "DFT", "STFT"), 4.0
) | dict.fromkeys(("If", "Loop", "Scan", "TopK", "NonZero", "Unique", "Compress", "CumSum", "CumProd"), 10.0)
#: Part of the time of a model from which on its source names such ops.
_TOLD_PART = 0.1
#: Stands for all kinds of models of a generation.
ANY_MODEL = "any"


def generation_of(device: Device) -> str:
    """Return what is put behind the kinds of ops and models of GPUs before Volta, which run kernels made for others."""
    return _OLD if float(device.compute_capability or 0) < _VOLTA else ""


def name_kinds(ops: OpTable, tensor: bool) -> NDArray[np.str_]:
    """Return the kind of each op, a key of `ErrorScales.ops`; ``tensor``: products run on tensor cores."""
    names = np.array([{"movement": "elementwise"}.get(family, family) for family in FAMILIES])[ops.family].astype(
        "<U20"
    )
    product = np.isin(names, ("matmul", "conv"))
    if tensor:
        names = np.where(product, np.where(ops.width > 1.0, "product tensor", "product narrow"), names)
    else:
        names = np.where(names == "matmul", np.where(ops.extra > 0.0, "batched product", "product"), names)
    names = np.where(ops.width > 4.0, "double", names)  # of which nothing was measured
    return np.where(names == "attention", attention_kinds(ops), names)


def launched_as(kind: str) -> str:
    """Return what `CostModel.floor_s` calls a kind of op: what launching and timing it took."""
    return _FLOORS.get(kind, "linear")


def excess_of(op_types: Sequence[str]) -> Array:
    """Return for each kernel how many times its predicted time it may take more because nothing like it was measured.

    Returns
    -------
    ndarray of shape (N,)
    """
    return np.array([_UNLIKE_MEASURED.get(op_type, 1.0) - 1.0 for op_type in op_types])


def name_unlike(op_types: Sequence[str], excess: float) -> tuple[str, ...]:
    """Return the op types like none that was measured where they are much of a model's time, sorted.

    ``excess``: mean of `excess_of` over the time of the model.
    """
    named = sorted(_UNLIKE_MEASURED.keys() & set(op_types))
    most = max((_UNLIKE_MEASURED[name] - 1.0 for name in named), default=1.0)
    return tuple(named) if excess > _TOLD_PART * most else ()


@dataclass(frozen=True, slots=True)
class TimeParts:
    """What the time of a model is made of."""

    #: ``kernels_s``, ``host_s``: Seconds of all kernels one after another, and of the host that launches them: the
    #: longer counts.
    kernels_s: float
    host_s: float
    by_kind: Mapping[str, float]  #: Kind of op → its part of the kernels' time.
    #: What part of the kernels' error the measurements of the GPU leave; 1 where nothing was measured.
    unsure: float = 1.0
    excess: float = 0.0  #: Mean of `excess_of` over the kernels' time.

    @property
    def total_s(self) -> float:
        """Seconds of a batch."""
        return max(self.kernels_s, self.host_s)


@dataclass(frozen=True, slots=True)
class ErrorScales:
    """Errors on GPUs left out, all logarithms of factors or multiples of such."""

    ops: Mapping[str, float]  #: `name_kinds` → scale.
    op_factors: Mapping[str, float]  #: `generation_of` → scales that hold nine of ten ops.
    #: Kind of model, or `ANY_MODEL`, and generation → mean scales of its kernels that hold nine of ten models.
    model_factors: Mapping[str, float]
    host: float  #: Scale of models that take as long as the host.

    @classmethod
    def of_text(cls, text: str) -> ErrorScales:
        """Return what `to_text` wrote. Raises `ValueError` when the text is not of this form."""
        known: Any = json.loads(text)
        try:
            read = cls(
                **{name: _numbers(known[name]) for name in ("ops", "op_factors", "model_factors")}, host=known["host"]
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"intervals.json lacks {error}") from None
        return read

    def to_text(self) -> str:
        """Return the JSON that ships."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    def scale_ops(self, kinds: NDArray[np.str_]) -> Array:
        """Return the scale of each op by its kind; of kinds that nobody measured the largest."""
        names, place = np.unique(kinds, return_inverse=True)
        most = max(self.ops.values(), default=1.0)
        return np.array([self.ops.get(str(name), most) for name in names], dtype=float)[place.reshape(-1)]

    def widen_ops(self, kinds: NDArray[np.str_], generation: str) -> Array:
        """Return for each op the factor f so that [t / f, t f] holds nine of ten."""
        return np.asarray(np.exp(self.scale_ops(kinds) * self.op_factors[generation]))

    def mean_scale(self, by_kind: Mapping[str, float]) -> float:
        """Return the scale of a model's kernels, each kind by its part of the time."""
        total = sum(by_kind.values())
        if total <= 0.0:
            return median(self.ops.values()) if self.ops else 1.0
        scales = self.scale_ops(np.array(list(by_kind)))
        return float(np.dot(scales, np.array(list(by_kind.values()))) / total)

    def widen_model(self, parts: TimeParts, kind: str, generation: str) -> float:
        """Return the factor f so that [t / f, t f] holds the time of a model nine of ten times."""
        of_kernels, scale = np.array([parts.kernels_s]), np.array([parts.unsure * self.mean_scale(parts.by_kind)])
        return float(self.widen_times(of_kernels, parts.host_s, scale, kind, generation)[0])

    def widen_times(self, kernels_s: Array, host_s: float, scale: Array, kind: str, generation: str) -> Array:
        """Return `widen_model` for N times of one model, from what its kernels and the host take.

        Parameters
        ----------
        kernels_s, scale : ndarray of shape (N,)
            ``scale`` as `mean_scale`.

        Returns
        -------
        ndarray of shape (N,)
        """
        factor = self.model_factors.get(kind + generation, self.model_factors[ANY_MODEL + generation])
        if not any(kind + one in self.model_factors for one in ("", _OLD)):
            # Nothing says that the errors of its ops cancel, as they do in kinds of models that were measured.
            factor = max(factor, self.op_factors[generation])
        high = np.maximum(kernels_s * np.exp(factor * scale), host_s * np.exp(self.host))
        total = np.maximum(kernels_s, host_s)
        return np.asarray(np.divide(high, total, out=np.ones(len(high)), where=total > 0.0))


def _numbers(known: Mapping[str, float]) -> dict[str, float]:
    return {str(name): float(value) for name, value in known.items()}
