"""Intervals of times on unmeasured GPUs, from the errors on held-out GPUs.

The scale of a kind of op is the logarithmic error within which nine of ten ops stayed on held-out GPUs. A conformal
factor is the number of scales that hold nine of ten ops of a further GPU; a second factor, by kind of model, is the
number of mean scales of a model's kernels that hold its time, since the errors of its ops cancel in part. Host time has
a scale of its own. `bench.unseen_intervals` fits all of them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import exp
from statistics import median

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.device import Device
from gpuprof.estimators.cross_gpu.features import FAMILIES, TENSOR_TYPES, VOLTA, Array, OpTable, attention_kinds
from gpuprof.estimators.cross_gpu.kernels import LaunchMode
from gpuprof.estimators.cross_gpu.node_groups import RECURRENT

_OLD = " old"
#: Op types unlike any measured type → maximum ratio of their time to the prediction, a guess. Recurrent layers of a
#: runtime may stay on the GPU for all steps or launch several kernels in each; sums of products, scattering and
#: sampling depend on their implementation and on the data; sorting, counting and control flow make the host wait.
_UNLIKE_MEASURED = dict.fromkeys(
    (*RECURRENT, "Einsum", "Scatter", "ScatterElements", "ScatterND", "GridSample", "DeformConv", "DFT", "STFT"), 4.0
) | dict.fromkeys(("If", "Loop", "Scan", "TopK", "NonZero", "Unique", "Compress", "CumSum", "CumProd"), 10.0)
#: Stands for all kinds of models of a generation.
ANY_MODEL = "any"


def generation_of(device: Device) -> str:
    """Return the suffix of kinds of ops and models for GPUs before Volta, which run kernels made for other GPUs."""
    return _OLD if float(device.compute_capability or 0) < VOLTA else ""


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
    names = np.where(ops.width > 4.0, "double", names)  # without measurements
    return np.where(names == "attention", attention_kinds(ops), names)


def excess_of(op_types: Sequence[str]) -> Array:
    """Return for each kernel the extra time, in multiples of the prediction, that op types unlike any measured may
    take.

    Returns
    -------
    ndarray of shape (N,)
    """
    return np.array([_UNLIKE_MEASURED.get(op_type, 1.0) - 1.0 for op_type in op_types])


def name_unlike(op_types: Sequence[str], excess: float) -> tuple[str, ...]:
    """Return the op types unlike any measured type where they may be a tenth of a model's time, sorted.

    ``excess``: mean of `excess_of` over the time of the model.
    """
    names = sorted(_UNLIKE_MEASURED.keys() & set(op_types))
    most = max((_UNLIKE_MEASURED[name] - 1.0 for name in names), default=1.0)
    return tuple(names) if excess > 0.1 * most else ()


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Parts of a model's time."""

    #: ``kernels_s``, ``host_s``: Seconds of all kernels in sequence, and of launching by the host: the longer counts.
    kernels_s: float
    host_s: float
    by_kind: Mapping[str, float]  #: Kind of op → its part of the kernels' time.
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
    host: float  #: Scale of models limited by the host.

    @classmethod
    def of_text(cls, text: str) -> ErrorScales:
        """Return the scales in a text of `to_text`."""
        return cls(**json.loads(text))

    def to_text(self) -> str:
        """Return the shipped JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    def scale_ops(self, kinds: NDArray[np.str_]) -> Array:
        """Return the scale of each op by its kind; for unmeasured kinds, the largest scale."""
        names, place = np.unique(kinds, return_inverse=True)
        most = max(self.ops.values(), default=1.0)
        return np.array([self.ops.get(str(name), most) for name in names], dtype=float)[place.reshape(-1)]

    def widen_ops(self, kinds: NDArray[np.str_], generation: str) -> Array:
        """Return the factor f of each op so that [t / f, t f] holds nine of ten ops."""
        return np.asarray(np.exp(self.scale_ops(kinds) * self.op_factors[generation]))

    def mean_scale(self, by_kind: Mapping[str, float]) -> float:
        """Return the scale of a model's kernels, each kind by its part of the time."""
        total = sum(by_kind.values())
        if total <= 0.0:
            return median(self.ops.values()) if self.ops else 1.0
        scales = self.scale_ops(np.array(list(by_kind)))
        return float(np.dot(scales, np.array(list(by_kind.values()))) / total)

    def widen_model(
        self, parts: TimeParts, kind: str, generation: str, *, named_host: bool = False, is_compared: bool = True
    ) -> float:
        """Return the factor f so that [t / f, t f] holds the time of a model nine of ten times.

        ``is_compared``: whether such estimates were held against measurements; else, and where no factor was fitted to
        the kind, the errors of ops are not assumed to cancel. Hosts differ by `host`; the time of a host whose launches
        were named is as sure as that of the kernels.
        """
        factor = self.model_factors.get(kind + generation, self.model_factors[ANY_MODEL + generation])
        is_fitted = any(kind + suffix in self.model_factors for suffix in ("", _OLD))
        if not (is_compared and is_fitted):
            factor = max(factor, self.op_factors[generation])
        scale = self.mean_scale(parts.by_kind)
        of_host = factor * scale if named_host else self.host
        high = max(parts.kernels_s * exp(factor * scale), parts.host_s * exp(of_host))
        return high / parts.total_s if parts.total_s > 0.0 else 1.0


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
