"""Corrects all ops of a new GPU by a few measured ops: a Gaussian process over the errors of predictions.

The error of an op is a sum of errors: an error common to all ops of the GPU, an error of the op's kind, and errors
shared by ops of similar duration and of similar shape. Launching in the measurement has an error of its own, weighted
by its part of the time. Errors are in units of those on held-out GPUs (`intervals.ErrorScales`), so that poorly known
kinds move further. The standard deviations of the parts were chosen on the held-out GPUs (`bench.unseen_gpus`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from gpuprof.estimators.cross_gpu.op_table import Array, OpTable

#: Standard deviations of the parts of the error, and of the unexplained noise, in units of the error on held-out GPUs.
_GPU, _KIND, _DURATION, _SHAPE, _LAUNCHING, _NOISE = 0.3, 0.3, 0.6, 0.8, 1.0, 0.5
#: Length scales of the process: powers of ten of an op's duration, and doublings of its sizes.
_DECADES, _DOUBLINGS = 0.6, 3.0
#: Distance added for each other difference between two ops, as causal attention.
_UNLIKE = 0.7
#: Errors are clipped here: a row further off carries no more information.
_FURTHEST = 2.0
#: Quantile of the normal distribution at which the scales stand.
_QUANTILE = 1.645
_SIZES, _MARKS = ("b", "m", "n", "k", "row"), ("extra", "stride", "causal", "kernel")
#: Maximum entries of a covariance block, so that memory stays bounded.
_LARGEST_BLOCK = 2_000_000


@dataclass(frozen=True, slots=True)
class OpPoints:
    """N ops as inputs of the process."""

    kind: NDArray[np.str_]  #: Shape (N,). Only ops of the same kind and precision share its error.
    duration: Array  #: Shape (N,). Logarithm to ten of the predicted seconds.
    #: ``sizes``, ``marks``: Shape (N, F). Logarithms to two of the sizes; other attributes that distinguish ops.
    sizes: Array
    marks: Array
    part: Array  #: Shape (N,). Kernel's part of the time, launch excluded.
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
        Predicted seconds of the kernel, and of the launch that was timed with it.
    scale : ndarray of shape (N,)
        As `ErrorScales.scale_ops`.
    """
    sizes = np.column_stack([np.log2(np.maximum(getattr(ops, name), 1.0)) for name in _SIZES])
    marks = np.column_stack([getattr(ops, name) for name in _MARKS])
    part = kernel_s / (kernel_s + launch_s)
    return OpPoints(kind, np.log10(np.maximum(kernel_s, 1e-12)), sizes, marks, part, scale / _QUANTILE)


def join_points(parts: Sequence[OpPoints]) -> OpPoints:
    """Return the ops of all parts, concatenated."""
    return OpPoints(*(np.concatenate([getattr(one, field.name) for one in parts]) for field in fields(OpPoints)))


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The posterior of the process given measured ops."""

    seen: OpPoints
    weights: Array  #: Shape (N,). Weights of the measured ops.
    inverse: Array  #: Shape (N, N). Inverse of their covariance.

    def correct(self, points: OpPoints) -> tuple[Array, Array]:
        """Return logarithmic corrections of predictions, and the remaining part of their error, in (0, 1]."""
        shift, uncertainty = np.zeros(len(points.kind)), np.ones(len(points.kind))
        step = max(1, _LARGEST_BLOCK // max(1, len(self.weights)))
        for start in range(0, len(shift), step):
            rows = slice(start, start + step)
            prior = points.take(rows)
            common = _covariance(prior, self.seen)
            # Posterior mean of the process; below, its posterior standard deviation over the prior.
            shift[rows] = prior.scale * (common @ self.weights)
            explained = ((common @ self.inverse) * common).sum(axis=1)
            uncertainty[rows] = np.sqrt(np.clip(1.0 - explained / (_variance(prior) + _NOISE**2), 0.0, 1.0))
        return shift, uncertainty


def adapt(seen: OpPoints, ratio: Array) -> Adaptation:
    """Return the adaptation to measured ops; ``ratio``: measured over predicted times, launches included."""
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
    # The diagonal of `_covariance`, computed alone.
    of_kernel = _GPU**2 + _KIND**2 + _DURATION**2 + _SHAPE**2
    return np.asarray(points.part**2 * of_kernel + (1.0 - points.part) ** 2 * _LAUNCHING**2)
