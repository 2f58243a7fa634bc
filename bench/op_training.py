"""Learns the regressors of ops from published measurements; `bench.unseen_training` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.published_ops import CHIP, OP_FAMILIES, MeasuredOps, aiconfigurator_ops, neusight_ops
from bench.tree_export import export_trees
from gpuprof.domain.catalogue import device
from gpuprof.estimators.cross_gpu.features import (
    FAMILIES,
    Array,
    DeviceRates,
    OpBounds,
    OpTable,
    attention_kinds,
    bound_times,
    features_of,
    rates_of,
    regressor_names,
    smallest_kernel_s,
)

#: A measurement that takes less than so many times an op of nothing says nothing of the op.
_TELLING = 1.2
_SMALLEST_QUANTILE = 0.02
#: The smallest convolutions that were measured take several times what launching and timing one does.
LAUNCHED_AS = {"conv": "bmm"}
_REGRESSORS = ("matmul_cores", "matmul_tensor", "conv_cores", "elementwise", "norm", "softmax", "attention")
_ROUNDS = 160
_PARAMETERS: Mapping[str, Any] = {
    "objective": "l1",
    "learning_rate": 0.09,
    "num_leaves": 31,
    "min_data_in_leaf": 80,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "feature_fraction": 0.8,
    "num_threads": 2,
    "deterministic": True,
    "force_row_wise": True,
    "seed": 1,
    "verbose": -1,
}
#: Sweeps hold many small ops and few of the sizes that models have: each doubling of an op's least time weighs by this
#: power of its number of rows less than they would.
_CROWDING = 0.5
_ROWS_OF_A_KIND = 60_000


@dataclass(frozen=True, slots=True)
class Trained:
    """Regressors as ONNX files, and what an op of nothing takes where it was measured."""

    models: Mapping[str, bytes]  #: `_REGRESSORS` → ONNX file.
    #: Family of `OP_FAMILIES` → median over the GPUs of what launching and timing the smallest op took.
    floor_s: Mapping[str, float]


def published_ops() -> list[MeasuredOps]:
    """Return all that ships with gpuprof; of AIConfigurator's so much as is learned from."""
    kinds = ("gemm", "context_attention", "generation_attention", "encoder_attention")
    tables = [neusight_ops(family) for family in OP_FAMILIES]
    return tables + [part for kind in kinds for part in aiconfigurator_ops(kind, _ROWS_OF_A_KIND)]


def chip_of(name: str) -> str:
    """Return the chip of a board, by which GPUs are left out."""
    return CHIP.get(name, name)


def floors(measured: MeasuredOps, excluded: str | None = None) -> dict[str, float]:
    """Return what the smallest ops took on each GPU in seconds; none where only kernels were timed or all are large."""
    if measured.kernels_only:
        return {}
    kept = measured.split == "train"
    names = sorted(set(measured.device[kept].tolist()))
    return {
        name: float(np.quantile(measured.seconds[kept & (measured.device == name)], _SMALLEST_QUANTILE))
        for name in names
        if chip_of(name) != excluded
    }


def train(data: Iterable[MeasuredOps], excluded: str | None = None, rounds: int = _ROUNDS) -> Trained:
    """Return regressors learned from ``data``, nothing of the chip ``excluded`` seen.

    A regressor gives the logarithm of an op's time, launches taken off, over its bound: the power limit, the drawn
    part of the bandwidth and Winograd's algorithm stand in the bound, so that what is left is how well tiles and
    waves fill a GPU.
    """
    rows: dict[str, list[tuple[Array, Array, Array]]] = {name: [] for name in _REGRESSORS}
    floor_s: dict[str, list[float]] = {}
    listed = list(data)
    found_floors = {part.name: floors(part, excluded) for part in listed}
    for part in listed:
        launched_as = LAUNCHED_AS.get(part.name, part.name)
        named_floors = found_floors.get(launched_as, found_floors[part.name])
        floor_s.setdefault(part.name, []).extend(named_floors.values())
        typical = float(np.median(list(named_floors.values()))) if named_floors else 0.0
        included = part.take(np.array([chip_of(name) != excluded for name in part.device]))
        prepared = _preparations(included)
        for name, seconds in prepared.items():
            floor_s.setdefault(name, []).append(seconds)
        for name in sorted(set(included.device.tolist())):
            _add_rows(rows, included.take(included.device == name), name, named_floors.get(name, typical), prepared)
    models = {name: _fit(model_rows, rounds) for name, model_rows in rows.items() if model_rows}
    return Trained(models, {name: float(np.median(floors)) for name, floors in floor_s.items() if floors})


def bounds_as_measured(part: MeasuredOps, rates: DeviceRates, prepared: Mapping[str, float]) -> OpBounds:
    """Return the bounds of measured ops under the conditions of the measurement; ``prepared``: `Trained.floor_s`."""
    first = bound_times(part.ops, rates, weight_sets=part.weight_sets)
    bounds = bound_times(part.ops, rates, part.estimate_throttling(first.expected_s), part.weight_sets)
    return replace(bounds, start_s=np.maximum(bounds.start_s, prepare_seconds(part.ops, rates, prepared)))


def preparation_names(ops: OpTable) -> NDArray[np.str_]:
    """Return kind and framework of each op whose time includes a framework's preparation; others empty.

    Attention is several kernels (appending to the cache, merging of splits), products in 8 bits quantise first.
    """
    attention = ops.family == FAMILIES.index("attention")
    narrow = (ops.family == FAMILIES.index("matmul")) & (ops.width == 1.0)
    kind = attention_kinds(ops)
    bits = np.where(ops.kernel > 0, " narrow ", " ")
    framework = np.where(attention, ops.stride, ops.extra).astype(np.int64).astype(str)
    names = np.char.add(np.char.add(kind, bits), framework)
    return np.where(attention, names, np.where(narrow, np.char.add("product narrow ", framework), ""))


def prepare_seconds(ops: OpTable, rates: DeviceRates, floor_s: Mapping[str, float]) -> Array:
    """Return the least seconds of a framework's preparation before each op, 0 where unknown.

    ``floor_s``: seconds at the clock of `preparation_part`, by `preparation_names`.
    """
    if not ((ops.family == FAMILIES.index("attention")) | (ops.width == 1.0)).any():
        return np.zeros(len(ops))  # comparing texts takes longer than all the rest
    names, place = np.unique(preparation_names(ops), return_inverse=True)
    seconds = np.array([floor_s.get(str(name), 0.0) if name else 0.0 for name in names])[place.reshape(-1)]
    return np.asarray(seconds * preparation_part(rates))


def preparation_part(rates: DeviceRates) -> float:
    """Return the time of a framework's preparation on a GPU, relative to a clock of 1.5 GHz.

    The preparation consists of kernels too short to fill the GPU: half of their time is taken as cycles, half as
    latencies of memory and launching, which are equal on all GPUs.
    """
    return 0.5 + 0.5 * rates.kernel_s / smallest_kernel_s()


def _preparations(part: MeasuredOps) -> dict[str, float]:
    """Return what frameworks do before ops took, by `preparation_names`: the middle over the GPUs."""
    if not part.kernels_only:
        return {}
    names = preparation_names(part.ops)
    by_name = {}
    for name in np.unique(names[names != ""]).tolist():
        gpus = np.unique(part.device[names == name])
        least = [
            np.quantile(part.seconds[(names == name) & (part.device == gpu)], _SMALLEST_QUANTILE)
            / preparation_part(rates_of(device(str(gpu)), part.precision))
            for gpu in gpus
        ]
        by_name[str(name)] = float(np.median(least))
    return by_name


def _add_rows(
    rows: dict[str, list[tuple[Array, Array, Array]]],
    part: MeasuredOps,
    name: str,
    floor: float,
    prepared: Mapping[str, float],
) -> None:
    rates = rates_of(device(name), part.precision)
    bounds = bounds_as_measured(part, rates, prepared)
    body = np.maximum(part.seconds - floor, 0.02 * part.seconds)
    telling = (part.seconds > _TELLING * floor) & part.fit_to_learn()
    weight = np.clip(body / part.seconds, 0.02, 1.0) * _balance_sizes(bounds.expected_s)
    target = np.log(body / (bounds.expected_s + bounds.start_s))
    names = regressor_names(part.ops, rates)
    for regressor in set(names.tolist()):
        kept = telling & (names == regressor)
        features = features_of(regressor, part.ops.take(kept), rates, bounds.take(kept))
        rows[regressor].append((features, target[kept], weight[kept]))


def _balance_sizes(expected_s: Array) -> Array:
    """Return weights, 1 in the mean, by which ops of sizes that a sweep has few of count more."""
    octave = np.floor(np.log2(expected_s)).astype(np.int64)
    _, place, count = np.unique(octave, return_inverse=True, return_counts=True)
    weight = 1.0 / count[place.reshape(-1)] ** _CROWDING
    return np.asarray(weight / weight.mean())


def _fit(parts: list[tuple[Array, Array, Array]], rounds: int) -> bytes:
    import lightgbm

    features, target, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
    data = lightgbm.Dataset(features, target, weight=weight, params={"verbose": -1})
    return export_trees(lightgbm.train(dict(_PARAMETERS), data, num_boost_round=rounds))
