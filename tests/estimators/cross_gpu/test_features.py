"""What bounds an op's time beside arithmetic: what the L2 cache keeps, blocks of attention, what frameworks prepare."""

from __future__ import annotations

import numpy as np
import pytest

from bench.published_ops import attention_table, product_table
from gpuprof.domain.catalogue import device
from gpuprof.estimators.cross_gpu.features import bound_times, preparation_names, prepare_seconds
from gpuprof.estimators.cross_gpu.op_table import Array, OpTable
from gpuprof.estimators.cross_gpu.rates import rates_of

L40S = rates_of(device("l40s"), "bfloat16")


def _product(columns: float, depth: float) -> OpTable:
    return _multiply(16.0, columns, depth)


def _multiply(rows: float, columns: float, depth: float) -> OpTable:
    b, m, n, k = (np.full(1, size) for size in (1.0, rows, columns, depth))
    return product_table(b, m, n, k, 2.0, 2.0, 0.0)


def _expected_seconds(ops: OpTable, sets: float | None = None) -> Array:
    return bound_times(ops, L40S, **({} if sets is None else {"weight_sets": sets})).expected_s


def test_weights_come_from_the_cache_only_where_all_that_are_used_in_turn_fit_into_it() -> None:
    small, middle = _product(2048, 2048), _product(4096, 4096)  # 8 and 32 MiB of 96
    from_memory = small.bytes_moved[0] / (L40S.bytes_per_s * L40S.drawn)
    assert _expected_seconds(small, 5.0)[0] < 0.5 * from_memory
    assert _expected_seconds(middle, 1.0)[0] < 0.5 * _expected_seconds(middle, 5.0)[0]
    assert _expected_seconds(middle, 5.0) == pytest.approx(_expected_seconds(middle))


def test_a_model_reads_its_weights_from_memory_and_its_activations_from_the_cache() -> None:
    weights = _product(2048, 2048)
    activations = _multiply(2048.0, 16.0, 2048.0)
    assert weights.bytes_moved == pytest.approx(activations.bytes_moved)
    assert _expected_seconds(activations)[0] < 0.5 * _expected_seconds(weights)[0]


def test_no_traffic_takes_less_time_than_a_part_of_it() -> None:
    times = [_expected_seconds(_product(columns, 4096.0), 5.0)[0] for columns in np.arange(16.0, 16384.0, 16.0)]
    assert (np.diff(times) > 0).all()


def test_many_short_sequences_take_longer_than_one_long_one_of_as_much_traffic() -> None:
    def attend(sequences: float, length: float) -> OpTable:
        every = [np.full(1, size) for size in (sequences, 8.0, 8.0, length, length, 64.0)]
        return attention_table(*every, causal=False, key_bytes=2.0)

    many, few = attend(1024.0, 4.0), attend(16.0, 256.0)
    assert many.bytes_moved == pytest.approx(few.bytes_moved)
    assert many.flops[0] < few.flops[0]
    assert _expected_seconds(many)[0] > 3.0 * _expected_seconds(few)[0]


def test_half_of_what_a_framework_prepares_takes_cycles() -> None:
    ones = np.ones(1)
    op = attention_table(ones, ones, ones, ones, ones, 64 * ones, causal=False, key_bytes=2.0)
    preparations = {str(preparation_names(op)[0]): 1e-5}
    seconds = {
        name: prepare_seconds(op, rates_of(device(name), "bfloat16"), preparations)[0] for name in ("l40s", "a100-80")
    }
    assert seconds["l40s"] == pytest.approx(1e-5 * (0.5 + 0.5 * 1500.0 / 2520.0))
    assert seconds["a100-80"] == pytest.approx(1e-5 * (0.5 + 0.5 * 1500.0 / 1410.0))
