"""Expected times of ops, which regressors multiply."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.estimators.learned.features import (
    NODE_NS,
    Array,
    OpFacts,
    expected_ns,
    regressor_features,
    roofline_ns,
)
from tests.estimators.rows import CPU, GPU

CACHED = replace(CPU, reread_bytes_per_s=((2**20, 1e11), (2**25, 5e10), (2**27, 1e10)))
_MATRIX = 1024
DENSE = OpFacts(
    "Gemm", "float32", ((1, _MATRIX), (_MATRIX, _MATRIX)), ((1, _MATRIX),), {}, 2.0 * _MATRIX**2,
    4.0 * (_MATRIX**2 + _MATRIX), 4.0 * _MATRIX, 4.0 * _MATRIX**2, 1,
)  # fmt: skip


def _expected_ns(ops: list[OpFacts], device: Device, share_pct: float = 100.0) -> Array:
    return expected_ns(regressor_features(ops, device, Share(share_pct)))


def test_on_a_cpu_arithmetic_and_traffic_add_up() -> None:
    moved = DENSE.bytes_read + DENSE.bytes_written
    expected = NODE_NS + DENSE.flops / 1e11 * 1e9 + moved / 1e10 * 1e9
    assert _expected_ns([DENSE], CPU)[0] == pytest.approx(expected)


def test_on_a_gpu_the_longer_of_both_is_what_counts() -> None:
    assert _expected_ns([DENSE], GPU)[0] == pytest.approx(NODE_NS + roofline_ns([DENSE], GPU, Share())[0])


def test_weights_come_from_where_all_that_the_model_touches_fits() -> None:
    sizes = (2.0**20, 2.0**25, 2.0**30, float("inf"))
    times = _expected_ns([replace(DENSE, working_set=size) for size in sizes], CACHED)
    bytes_s = (DENSE.bytes_read + DENSE.bytes_written - DENSE.weight_bytes) / 1e11
    rates = (1e11, 5e10, 1e10, 1e10)
    # the op's own traffic is some 4 MiB with its weights: between the first two rates
    between = (
        bytes_s * 1e11 / np.exp(np.interp(np.log(DENSE.bytes_read + 4096), np.log([2**20, 2**25]), np.log(rates[:2])))
    )
    expected = [(DENSE.weight_bytes / rate + between) * 1e9 for rate in rates]
    assert times - NODE_NS - DENSE.flops / 1e11 * 1e9 == pytest.approx(expected)


def test_a_share_has_its_part_of_the_caches_and_of_memory_what_its_cores_can_draw() -> None:
    still = replace(DENSE, flops=0.0)
    near, far = (replace(still, working_set=size) for size in (2.0**20, 2.0**30))
    whole, half = (_expected_ns([near, far], CACHED, pct) - NODE_NS for pct in (100.0, 50.0))
    assert half[0] == pytest.approx(2.0 * whole[0])
    assert half[1] == pytest.approx(whole[1], rel=0.01)  # half of the cores draw all of the bandwidth
