"""Corrects the ops of a GPU by ops measured on it: each kind of op by the mean error of its measured ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from gpuprof.estimators.conformal import LEVEL, quantile
from gpuprof.estimators.cross_gpu.op_table import Array, OpTable


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Corrections by `name_alike`; other ops stay as predicted."""

    ops: int  #: Number of measured ops.
    shift: Mapping[str, float]  #: Logarithm of measured over predicted time.
    left: Mapping[str, float]  #: Part of the interval that remains, in (0, 1].

    def correct(self, alike: NDArray[np.str_]) -> tuple[Array, Array]:
        """Return logarithmic corrections of ops, and the remaining part of their error."""
        names, place = np.unique(alike, return_inverse=True)
        columns = (
            [table.get(str(name), usual) for name in names] for table, usual in ((self.shift, 0.0), (self.left, 1.0))
        )
        shift, remainder = (np.array(column, dtype=float)[place.reshape(-1)] for column in columns)
        return shift, remainder


def name_alike(ops: OpTable, kinds: NDArray[np.str_]) -> NDArray[np.str_]:
    """Return for each op its kind and bytes of an element: ops of equal names are corrected alike."""
    return np.char.add(np.char.add(kinds, " "), ops.width.astype(np.int64).astype(str))


def adapt(alike: NDArray[np.str_], ratio: Array, scale: Array) -> Adaptation:
    """Return the adaptation to measured ops.

    The prediction counts as one more measurement of each kind. The interval narrows where a kind has enough measured
    ops for a conformal quantile of their deviations.

    Parameters
    ----------
    alike : ndarray of shape (N,)
        As `name_alike`.
    ratio : ndarray of shape (N,)
        Measured over predicted times.
    scale : ndarray of shape (N,)
        As `ErrorScales.scale_ops`.
    """
    shift, remainder = {}, {}
    for name in np.unique(alike).tolist():
        errors = np.log(ratio[alike == name])
        shift[name] = float(errors.sum() / (len(errors) + 1))
        is_enough = ceil(LEVEL * (len(errors) + 1)) <= len(errors)
        spread = quantile(np.abs(errors - shift[name]).tolist(), LEVEL) if is_enough else None
        remainder[name] = 1.0 if spread is None else min(1.0, spread / float(scale[alike == name][0]))
    return Adaptation(len(ratio), shift, remainder)
