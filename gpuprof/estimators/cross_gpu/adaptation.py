"""What a few measured ops of a new GPU say of all its ops: a Gaussian process over the errors of what was predicted.

The error of an op is taken as the sum of one that all ops of the GPU share, one of its kind, and one that ops of like
duration and like shape share; what launching took where the ops were measured has an error of its own, which weighs by
its part of the time. Errors are in units of those on GPUs left out (`intervals.ErrorScales`), so that a kind of which
little was known before moves further. How much of each there is was chosen by the GPUs left out (`bench.unseen_gpus`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from gpuprof.estimators.cross_gpu.op_table import Array, OpTable

#: Standard deviations of the parts of the error, in units of that on GPUs left out, and of what no part explains.
_GPU, _KIND, _DURATION, _SHAPE, _LAUNCHING, _NOISE = 0.3, 0.3, 0.6, 0.8, 1.0, 0.5
#: Over how many powers of ten of its duration, and doublings of its sizes, the error of an op is alike.
_DECADES, _DOUBLINGS = 0.6, 3.0
#: Ops that differ in another way, as in what attention is causal, have so much less in common.
_UNLIKE = 0.7
#: A row that is further off says no more.
_FURTHEST = 2.0
#: Quantile of the normal distribution that the scales stand at.
_QUANTILE = 1.645
_SIZES, _MARKS = ("b", "m", "n", "k", "row"), ("extra", "stride", "causal", "kernel")
#: Entries of a covariance that are computed at once, so that memory stays bounded.
_LARGEST_BLOCK = 2_000_000


@dataclass(frozen=True, slots=True)
class OpPoints:
    """N ops as the process sees them."""

    kind: NDArray[np.str_]  #: Shape (N,). Only ops of one kind and precision have its error in common.
    duration: Array  #: Shape (N,). Logarithm to ten of the predicted seconds.
    #: ``sizes``, ``marks``: Shape (N, F). Logarithms to two of the sizes; what tells ops apart beside.
    sizes: Array
    marks: Array
    part: Array  #: Shape (N,). What of the time is the kernel, and not its launch.
    scale: Array  #: Shape (N,). Standard deviation of the error on GPUs left out.

    def take(self, rows: slice | NDArray[np.int64]) -> OpPoints:
        """Return the ops at positions."""
        return OpPoints(*(getattr(self, field.name)[rows] for field in fields(self)))


def describe_points(
    ops: OpTable, kind: NDArray[np.str_], kernel_s: Array, scale: Array, launch_s: Array | float = 0.0
) -> OpPoints:
    """Return ops as points.

    Parameters
    ----------
    kernel_s, launch_s : ndarray of shape (N,)
        What is predicted of the kernel, and of the launch that was timed with it.
    scale : ndarray of shape (N,)
        As `ErrorScales.scale_ops`.
    """
    sizes = np.column_stack([np.log2(np.maximum(getattr(ops, name), 1.0)) for name in _SIZES])
    marks = np.column_stack([getattr(ops, name) for name in _MARKS])
    part = kernel_s / (kernel_s + launch_s)
    return OpPoints(kind, np.log10(np.maximum(kernel_s, 1e-12)), sizes, marks, part, scale / _QUANTILE)


def join_points(parts: Sequence[OpPoints]) -> OpPoints:
    """Return the ops of all parts, one after another."""
    return OpPoints(*(np.concatenate([getattr(one, field.name) for one in parts]) for field in fields(OpPoints)))


@dataclass(frozen=True, slots=True)
class Adaptation:
    """What measured ops say."""

    seen: OpPoints
    weights: Array  #: Shape (N,). Of each of them.
    inverse: Array  #: Shape (N, N). Of their covariance.

    def correct(self, points: OpPoints) -> tuple[Array, Array]:
        """Return by what logarithm predictions are to be moved, and what part of their error is left, in (0, 1]."""
        shift, uncertainty = np.zeros(len(points.kind)), np.ones(len(points.kind))
        step = max(1, _LARGEST_BLOCK // max(1, len(self.weights)))
        for start in range(0, len(shift), step):
            rows = slice(start, start + step)
            prior = points.take(rows)
            common = _covariance(prior, self.seen)
            # The posterior mean of the process, and below its standard deviation after over that before the
            # measurements.
            shift[rows] = prior.scale * (common @ self.weights)
            explained = ((common @ self.inverse) * common).sum(axis=1)
            uncertainty[rows] = np.sqrt(np.clip(1.0 - explained / (_variance(prior) + _NOISE**2), 0.0, 1.0))
        return shift, uncertainty


def adapt(seen: OpPoints, ratio: Array) -> Adaptation:
    """Return what ops say whose measured times are ``ratio`` of those predicted, launches included."""
    error = np.clip(np.log(ratio) / seen.scale, -_FURTHEST, _FURTHEST)
    inverse = np.asarray(np.linalg.inv(_covariance(seen, seen) + _NOISE**2 * np.eye(len(error))), dtype=np.float64)
    return Adaptation(seen, inverse @ error, inverse)


def _covariance(points: OpPoints, others: OpPoints) -> Array:
    duration = (points.duration[:, None] - others.duration[None, :]) ** 2 / (2.0 * _DECADES**2)
    distance = np.zeros(duration.shape)
    for column in range(points.sizes.shape[1]):
        distance += (points.sizes[:, column, None] - others.sizes[None, :, column]) ** 2
    distance /= 2.0 * _DOUBLINGS**2
    for column in range(points.marks.shape[1]):
        distance += _UNLIKE * (points.marks[:, column, None] != others.marks[None, :, column])
    of_shape = _KIND**2 + _DURATION**2 * np.exp(-duration) + _SHAPE**2 * np.exp(-distance)
    _, kinds = np.unique(np.concatenate([points.kind, others.kind]), return_inverse=True)
    same = kinds[: len(points.kind), None] == kinds[None, len(points.kind) :]
    launched = (1.0 - points.part)[:, None] * (1.0 - others.part)[None, :]
    return np.asarray(
        points.part[:, None] * others.part[None, :] * (_GPU**2 + same * of_shape) + launched * _LAUNCHING**2
    )


def _variance(points: OpPoints) -> Array:
    # The diagonal of `_covariance`, without the rest of it.
    of_kernel = _GPU**2 + _KIND**2 + _DURATION**2 + _SHAPE**2
    return np.asarray(points.part**2 * of_kernel + (1.0 - points.part) ** 2 * _LAUNCHING**2)
