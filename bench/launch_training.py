"""Learns how kernels are launched from published launches, for the regressors that ship with gpuprof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bench.op_training import chip_of
from bench.published_launches import Launches
from bench.tree_export import export_trees
from gpuprof.domain.catalogue import device
from gpuprof.estimators.creq import FIXED_WARPS, kinds_of
from gpuprof.estimators.cross_gpu.features import Array, bound_times, features_of, rates_of

#: Kinds of kernels, each with two regressors; features as `cross_gpu.features.features_of` gives them.
_KINDS = ("matmul_cores", "conv_cores", "elementwise", "norm", "softmax")
_TARGETS = ("warps", "waves")
_ROUNDS = 60
_PARAMETERS: Mapping[str, Any] = {
    "learning_rate": 0.12,
    "num_leaves": 24,
    "min_data_in_leaf": 40,
    "num_threads": 2,
    "deterministic": True,
    "force_row_wise": True,
    "seed": 1,
    "verbose": -1,
}


def train_launches(data: Iterable[Launches], excluded: str | None = None, rounds: int = _ROUNDS) -> dict[str, bytes]:
    """Return regressors as ONNX files, by ``kind_target.onnx``, nothing of the chip ``excluded`` seen."""
    rows: dict[str, list[tuple[Array, Array, Array]]] = {kind: [] for kind in _KINDS}
    for part in data:
        for name in sorted(set(part.measured.device.tolist())):
            if chip_of(name) == excluded:
                continue
            of_device = part.take(part.measured.device == name)
            gpu = device(name)
            rates = rates_of(gpu, of_device.measured.precision)
            most = gpu.sm.warps if gpu.sm is not None else 1
            kinds = kinds_of(of_device.measured.ops, rates)
            for kind in sorted(set(kinds.tolist())):
                kept = np.flatnonzero(kinds == kind)
                ops = of_device.measured.ops.take(kept)
                features = features_of(kind, ops, rates, bound_times(ops, rates))
                rows[kind].append(
                    (
                        features,
                        of_device.warps[kept] / (1 if kind in FIXED_WARPS else most),
                        np.log2(of_device.waves[kept]),
                    )
                )
    fitted = {}
    for kind, listed in rows.items():
        features, *targets = (np.concatenate(column) for column in zip(*listed, strict=True))
        for target, values in zip(_TARGETS, targets, strict=True):
            usual = kind in FIXED_WARPS and target == "warps"  # one of a few numbers: the usual one, no mean of them
            fitted[f"{kind}_{target}.onnx"] = _fit(features, values, rounds, "l1" if usual else "l2")
    return fitted


def _fit(features: Array, target: Array, rounds: int, objective: str) -> bytes:
    import lightgbm

    data = lightgbm.Dataset(features, target, params={"verbose": -1})
    return export_trees(lightgbm.train({**_PARAMETERS, "objective": objective}, data, num_boost_round=rounds))
