"""What an op should take, which regressors multiply."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpuprof.domain.share import Share
from gpuprof.estimators.learned.expected_time import (
    EXPECTED_FEATURES,
    NODE_NS,
    OpCosts,
    costs_of,
    expected_features,
    expected_ns,
    fit_element_ns,
)
from gpuprof.estimators.learned.features import roofline_ns
from gpuprof.estimators.learned.op_facts import OpFacts
from tests.estimators.rows import CPU, GPU

CACHED = replace(CPU, reread_bytes_per_s=((2**20, 1e11), (2**25, 5e10), (2**27, 1e10)))
_MATRIX = 1024
DENSE = OpFacts(
    "Gemm", "float32", ((1, _MATRIX), (_MATRIX, _MATRIX)), ((1, _MATRIX),), {}, 2.0 * _MATRIX**2,
    4.0 * (_MATRIX**2 + _MATRIX), 4.0 * _MATRIX, 4.0 * _MATRIX**2, 1,
)  # fmt: skip


def test_on_a_cpu_arithmetic_and_traffic_add_up() -> None:
    costs = costs_of([DENSE], CPU, Share())
    moved = DENSE.bytes_read + DENSE.bytes_written
    assert expected_ns(costs, {})[0] == pytest.approx(NODE_NS + DENSE.flops / 1e11 * 1e9 + moved / 1e10 * 1e9)


def test_on_a_gpu_the_longer_of_both_is_what_counts() -> None:
    assert expected_ns(costs_of([DENSE], GPU, Share()), {})[0] == pytest.approx(
        NODE_NS + roofline_ns([DENSE], GPU, Share())[0]
    )


def test_weights_come_from_where_all_that_the_model_touches_fits() -> None:
    sizes = (2.0**20, 2.0**25, 2.0**30, float("inf"))
    costs = costs_of([replace(DENSE, working_set=size) for size in sizes], CACHED, Share())
    bytes_s = (DENSE.bytes_read + DENSE.bytes_written - DENSE.weight_bytes) / 1e11
    rates = (1e11, 5e10, 1e10, 1e10)
    # the op's own traffic is some 4 MiB with its weights: between the first two rates
    between = (
        bytes_s * 1e11 / np.exp(np.interp(np.log(DENSE.bytes_read + 4096), np.log([2**20, 2**25]), np.log(rates[:2])))
    )
    expected = [(DENSE.weight_bytes / rate + between) * 1e9 for rate in rates]
    assert costs.traffic_ns == pytest.approx(expected)


def test_a_share_has_its_part_of_the_caches_and_of_memory_what_its_cores_can_draw() -> None:
    near, far = (replace(DENSE, working_set=size) for size in (2.0**20, 2.0**30))
    whole, half = (costs_of([near, far], CACHED, Share(pct)).traffic_ns for pct in (100.0, 50.0))
    assert half[0] == pytest.approx(2.0 * whole[0])
    assert half[1] == pytest.approx(whole[1], rel=0.01)  # half of the cores draw all of the bandwidth


def test_what_an_element_costs_is_learnt_of_types_that_several_architectures_have() -> None:
    elements = np.array([10_000.0, 20_000.0, 40_000.0, 100.0, 10_000.0])
    costs = OpCosts(("LRN", "LRN", "LRN", "LRN", "Pow"), np.zeros(5), np.ones(5), elements)
    times = expected_ns(costs, {}) + np.array([25.0, 25.0, 27.0, 900.0, 9.0]) * elements
    rates = fit_element_ns(costs, times, ("a", "b", "b", "a", "a"))
    assert rates == {"LRN": pytest.approx(25.5)}  # too few elements say nothing, and one architecture is no rate
    assert expected_ns(costs, rates)[2] == pytest.approx(expected_ns(costs, {})[2] + 25.5 * 40_000)


def test_an_op_faster_than_its_traffic_costs_nothing_more_an_element() -> None:
    costs = OpCosts(("Relu", "Relu"), np.zeros(2), np.full(2, 1e6), np.full(2, 1e6))
    assert fit_element_ns(costs, np.full(2, 5e5), ("a", "b")) == {"Relu": 0.0}


def test_the_parts_are_told_as_parts_of_the_whole() -> None:
    costs = OpCosts(("Gemm",), np.array([6e6]), np.array([2e6]), np.zeros(1))
    features = expected_features(costs, {})
    assert features.shape == (1, len(EXPECTED_FEATURES))
    assert np.exp(features[0]) == pytest.approx([8.002e6, 6.0 / 8.002, 2.0 / 8.002], rel=1e-5)
