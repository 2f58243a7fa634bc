"""What no other GPU could tell is told from what is a GPU's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.error_floor import (
    describe_error,
    fold_shapes,
    framework_of,
    predict_left_out,
    predict_with_own_data,
    spread_of,
    tell_floors,
)
from bench.op_training import train
from bench.published_ops import MeasuredOps, attention_table, product_table
from gpuprof.estimators.cross_gpu.op_table import Array, OpTable, stack_tables


def _products(count: int, extra: float = 0.0) -> OpTable:
    m, n, k = np.random.default_rng(0).integers(1, 4000, (3, count)).astype(float)
    return product_table(np.ones(count), m, n, k, 4.0, 4.0, extra)


def test_a_shape_is_left_out_of_all_gpus_and_frameworks_at_once() -> None:
    once = _products(200)
    again = replace(once, extra=once.extra + 1.0)
    folds = fold_shapes(stack_tables([once, again]))
    assert folds[:200].tolist() == folds[200:].tolist()
    assert sorted(set(folds.tolist())) == [0, 1, 2, 3, 4]


def test_the_spread_is_of_ops_that_agree_in_all_and_of_none_that_differ() -> None:
    ops = _products(3)
    twice = stack_tables([ops, ops])
    seconds = np.array([1.0, 2.0, 3.0, 3.0, 2.0, 3.0])
    spread = spread_of(twice, seconds)
    assert spread is not None
    # The first pair is 1 and 3, whose median of 2 is 100% and 33% off; the others agree.
    assert spread == pytest.approx((1.0 + 1.0 / 3.0) / 6.0)
    assert spread_of(ops, seconds[:3]) is None


def test_a_bias_is_told_apart_from_what_is_left_behind_it() -> None:
    measured = np.array([1.0, 2.0, 4.0])
    assert describe_error(1.5 * measured, measured).split() == ["50.0", "(+50;", "0.0)"]
    assert describe_error(measured * [0.5, 1.0, 1.5], measured).split() == ["33.3", "(+0;", "33.3)"]


def test_the_framework_stands_elsewhere_for_attention_than_for_products() -> None:
    few = np.ones(2)
    attention = attention_table(
        few, few, few, few, few, 64.0 * few, causal=True, key_bytes=2.0, framework=np.array([1.0, 2.0])
    )
    assert framework_of(attention).tolist() == [1, 2]
    assert framework_of(_products(2, extra=2.0)).tolist() == [2, 2]


def _make_measured_ops(factor: float, count: int = 600) -> MeasuredOps:
    """Return products whose time is a law of their shape, on one GPU so many times as long as on the others."""
    ops = _products(count)
    seconds = ops.flops / 1e13 + 1e-3
    gpus = ("t4", "v100-pcie-32", "a100-pcie-40")
    device = np.repeat(gpus, count)
    times: Array = np.concatenate([seconds, seconds, factor * seconds])
    table = stack_tables([ops, ops, ops])
    return MeasuredOps("bmm", "float32", table, times, device, np.full(3 * count, "test"), kernels_only=False)


@pytest.mark.slow
def test_what_is_a_gpus_own_is_known_with_its_data_and_missed_without() -> None:
    part = _make_measured_ops(factor=3.0)
    known = predict_with_own_data([part])[0]
    left_out = predict_left_out(part, {chip: train([part], chip) for chip in ("t4", "v100-pcie-32", "a100")})
    odd = part.device == "a100-pcie-40"
    errors = [np.abs(found[odd] / part.seconds[odd] - 1.0).mean() for found in (known, left_out)]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.slow
def test_each_gpu_has_a_line_and_one_that_is_not_learned_from_says_so() -> None:
    part = replace(_make_measured_ops(factor=1.0, count=300), name="linear")
    part = replace(part, device=np.where(part.device == "t4", "p4", part.device))
    known = predict_with_own_data([part])
    lines = list(tell_floors([part], known, {chip: train([part], chip) for chip in ("p4", "v100-pcie-32", "a100")}))
    assert len(lines) == 3
    assert ["not learned from" in line for line in lines] == [" p4 " in line for line in lines]
