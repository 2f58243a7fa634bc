"""Expected time of an op on a device: the sum of arithmetic, traffic, and a cost per element of its type.

On a CPU the parts add up: a core waits for data outside its caches, and little of the wait is hidden behind arithmetic
(of a product of 16 rows by 2048 x 2048 weights on one core, 1.40 ms are arithmetic, 0.35 ms traffic, and 1.70 ms were
measured). On a GPU, whose threads hide one behind the other, the expected time is the roofline. Regressors learn the
ratio of an op's time to it, which differs far less from op to op than the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.estimators.learned.convolution import computed_flops, unfolded_bytes
from gpuprof.estimators.learned.features import Array, roofline_ns
from gpuprof.estimators.learned.op_facts import OpFacts
from gpuprof.estimators.roofline.op_work import MATRIX_OPS, RECURRENT_OPS
from gpuprof.estimators.roofline.roofline import reread_bandwidth

#: Time of a runtime per node without work.
NODE_NS = 2000.0
#: Names of the columns of `expected_features`.
EXPECTED_FEATURES = ("log_expected_ns", "log_arithmetic_part", "log_traffic_part")

#: Least elements of an op for the fit: below, the cost of the node outweighs that of the elements.
_MANY_ELEMENTS = 5000
#: Least number of architectures: a single architecture may have an op type only in an unusual shape.
_FEWEST_ARCHITECTURES = 2
_PRODUCTS = MATRIX_OPS | RECURRENT_OPS | {"Einsum", "MatMulInteger", "ConvInteger"}


@dataclass(frozen=True, slots=True)
class OpCosts:
    """Expected costs of ops by the device's rates."""

    op_types: tuple[str, ...]
    #: ``arithmetic_ns``, ``traffic_ns``: Shape (N,).
    arithmetic_ns: Array
    traffic_ns: Array
    #: Shape (N,). Elements of each op's larger side; 0 for products of matrices, whose arithmetic is known.
    elements: Array

    def select_ops(self, mask: Array) -> OpCosts:
        """Return the ops selected by a mask of shape (N,)."""
        types = tuple(op_type for op_type, keep in zip(self.op_types, mask, strict=True) if keep)
        return OpCosts(types, self.arithmetic_ns[mask], self.traffic_ns[mask], self.elements[mask])


def costs_of(ops: Sequence[OpFacts], device: Device, share: Share) -> OpCosts:
    """Return the expected costs of ``ops`` on ``share`` of ``device``."""
    types = tuple(facts.op_type for facts in ops)
    elements = np.array([_elements(facts) for facts in ops], dtype=float)
    if device.kind != "cpu":
        return OpCosts(types, roofline_ns(ops, device, share), np.zeros(len(ops)), elements)
    flops = np.array([computed_flops(facts) for facts in ops], dtype=float)
    peak = device.flops_per_s["float32"] * device.fraction(share)
    return OpCosts(types, flops / peak * 1e9, _traffic_s(ops, device, share) * 1e9, elements)


def merged_costs(parts: Sequence[OpCosts]) -> OpCosts:
    """Return the costs of several groups of ops as a single group."""
    return OpCosts(
        tuple(op_type for part in parts for op_type in part.op_types),
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("arithmetic_ns", "traffic_ns", "elements")
        ),
    )


def fit_element_ns(costs: OpCosts, times_ns: Array, groups: Sequence[str]) -> Mapping[str, float]:
    """Return for each op type the time per element beyond the device's rates, in nanoseconds.

    The median over architectures of the medians over their ops; types of fewer than two architectures are left out.

    Parameters
    ----------
    times_ns : ndarray of shape (N,)
        Measured.
    groups : sequence of str, length N
        Architectures.
    """
    more = np.maximum(times_ns - expected_ns(costs, {}), 0.0) / np.maximum(costs.elements, 1.0)
    by_type: dict[str, dict[str, list[float]]] = {}
    for op_type, group, elements, value in zip(costs.op_types, groups, costs.elements, more, strict=True):
        if elements >= _MANY_ELEMENTS:
            by_type.setdefault(op_type, {}).setdefault(group, []).append(float(value))
    return {
        op_type: float(np.median([np.median(values) for values in by_group.values()]))
        for op_type, by_group in sorted(by_type.items())
        if len(by_group) >= _FEWEST_ARCHITECTURES
    }


def expected_ns(costs: OpCosts, element_ns: Mapping[str, float]) -> Array:
    """Return the expected time of each op in nanoseconds, an array of shape (N,)."""
    rates = np.array([element_ns.get(op_type, 0.0) for op_type in costs.op_types])
    return np.asarray(NODE_NS + costs.arithmetic_ns + costs.traffic_ns + rates * costs.elements)


def expected_features(costs: OpCosts, element_ns: Mapping[str, float]) -> Array:
    """Return the regressors' columns of the expected time, an array of shape (N, 3)."""
    expected = expected_ns(costs, element_ns)
    return np.column_stack(
        [np.log(expected), np.log((costs.arithmetic_ns + 1.0) / expected), np.log((costs.traffic_ns + 1.0) / expected)]
    )


def _traffic_s(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the time of each op's traffic: weights at the whole model's reuse distance, the rest at the op's own."""
    weights = np.array([facts.weight_bytes for facts in ops], dtype=float)
    total = np.array([facts.bytes_read + facts.bytes_written for facts in ops], dtype=float)
    activations = np.maximum(total - weights, 0.0) + np.array([unfolded_bytes(facts) for facts in ops])
    since_last_run = np.array([facts.working_set for facts in ops], dtype=float)
    return np.asarray(
        weights / reread_bandwidth(device, share, since_last_run) + activations / reread_bandwidth(device, share, total)
    )


def _elements(facts: OpFacts) -> float:
    if facts.op_type in _PRODUCTS:
        return 0.0
    return float(max(sum(prod(shape) for shape in side) for side in (facts.inputs, facts.outputs)))
