"""Bounds of an op's time: what a GPU holds of its peaks, the L2 cache, blocks of attention, preparation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.published_ops import attention_table, product_table
from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.features import Array, OpTable, bound_times, preparation_names, prepare_seconds
from gpuprof.estimators.cross_gpu.rates import rates_of, resolve_precision, sustained_part

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


def test_small_boards_never_hold_their_boost_clock() -> None:
    held = {name: sustained_part(device(name), "float32") for name in ("t4", "l4", "a100-pcie-40", "a100-80")}
    assert held["l4"] < held["t4"] < 0.6 < held["a100-pcie-40"] < held["a100-80"] == 1.0


def test_a_higher_power_limit_never_slows_a_board() -> None:
    l4 = device("l4")
    held = [sustained_part(replace(l4, max_power_w=watts), "float32") for watts in (40.0, 72.0, 150.0, 400.0)]
    assert held == sorted(held)
    assert held[-1] <= 1.0


def test_the_power_limit_slows_the_first_tensor_cores_more_than_the_same_board_with_later_ones() -> None:
    for name in ("v100", "t4"):
        board = device(name)
        later = replace(board, compute_capability="8.0")
        assert sustained_part(board, "float16") < 0.85 * sustained_part(later, "float16")
        assert sustained_part(board, "float32") == sustained_part(later, "float32")


def test_a_gpu_without_tensor_cores_is_not_slowed_like_the_first_of_them() -> None:
    p100 = device("p100")
    assert sustained_part(p100, "float16") == sustained_part(replace(p100, compute_capability="8.0"), "float16")


def test_an_unknown_process_or_limit_is_no_reason_to_slow_down() -> None:
    assert sustained_part(replace(device("t4"), process_nm=None), "float32") == 1.0
    assert sustained_part(replace(device("t4"), max_power_w=None), "float32") == 1.0


def test_a_share_has_its_sms_and_an_instance_its_slices_of_memory() -> None:
    a100 = device("a100-80")
    whole, half = rates_of(a100, "float32"), rates_of(a100, "float32", Share(50.0))
    assert half.units == whole.units / 2
    assert half.matrix_per_s == whole.matrix_per_s / 2
    slice_ = rates_of(a100, "float32", Share(100.0, "1g.10gb"))
    assert slice_.bytes_per_s == a100.dram_bytes_per_s / 8
    assert slice_.units == 14


def test_a_precision_that_a_gpu_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(InputError, match=r"t4 has no float8 arithmetic \(it has float16, float32, float64, int8\)"):
        rates_of(device("t4"), "float8")


@pytest.mark.parametrize(
    ("name", "asked", "found"),
    [("v100", "tfloat32", "float32"), ("h100", "tfloat32", "tfloat32"), ("t4", "bfloat16", "float16")],
)
def test_a_type_is_computed_in_what_the_gpu_has(name: str, asked: str, found: str) -> None:
    assert resolve_precision(device(name), asked) == found


def test_the_v100_draws_half_as_much_again_as_the_p100() -> None:
    drawn = {name: device(name).dram_bytes_per_s * rates_of(device(name), "float32").drawn for name in ("v100", "p100")}
    assert drawn["v100"] / drawn["p100"] == pytest.approx(1.5, rel=0.1)


def test_the_power_limit_counts_at_the_clock_that_the_tensor_cores_peak_is_told_at() -> None:
    h100 = device("h100")
    slower = replace(h100, clock_mhz=1830.0)
    assert sustained_part(h100, "bfloat16") == pytest.approx(sustained_part(slower, "bfloat16"), rel=1e-3)
    assert sustained_part(h100, "bfloat16") < sustained_part(replace(h100, clock_mhz=1500.0), "bfloat16")
