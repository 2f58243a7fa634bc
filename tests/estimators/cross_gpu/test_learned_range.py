"""GPUs that are far from all that was learned from are told, and their intervals reach further."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import gpuprof
from bench.op_training import chip_of
from gpuprof.domain.catalogue import datasets, device, device_of_driver, devices
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.learned_range import LEARNED_FROM, describe_distance, measure_distance

ODD = """
[odd]
compute_units = {sms}
clock_mhz = 1500
dram_mib = 16000
dram_gb_per_s = 500
l2_mib = 4
compute_capability = "8.6"
tflops = {{ float32 = {tflops} }}
"""


def test_what_was_learned_from_is_what_was_measured() -> None:
    learned_names: set[str] = set()
    for path in [datasets() / "neusight" / "ops.parquet", *(datasets() / "aiconfigurator").iterdir()]:
        with path.open("rb") as file:
            names = pq.read_table(file, columns=["device"]).column("device").unique().to_pylist()
        for name in names:
            catalogued = devices().get(name) or device_of_driver(name)
            learned_names.add(catalogued.name if catalogued else name)
    boards = [board for chip in LEARNED_FROM.values() for board in chip]
    assert sorted(learned_names) == sorted(boards)
    for boards_of_chip in LEARNED_FROM.values():
        assert len({chip_of(board) for board in boards_of_chip}) == 1


def test_boards_that_are_no_further_off_than_those_left_out_were_stay_as_they_are() -> None:
    for board in devices().values():
        for precision in set(board.flops_per_s) - {"float64"}:
            distance = measure_distance(board, precision)
            assert board.name == "k80" or distance is None or distance.factor < 1.1
        assert board.name == "k80" or describe_distance(board, "float32") is None


def test_a_gpu_is_as_far_off_as_its_furthest_trait_beyond_what_left_out_gpus_were() -> None:
    # 20 SMs of the P4, half of the next, are the furthest that one of them is from the others.
    many = replace(device("l40s"), compute_units=142 * 8, flops_per_s={"float32": 8 * 91.6e12})
    many = replace(many, l2_bytes=8 * many.l2_bytes, dram_bytes_per_s=8 * many.dram_bytes_per_s, max_power_w=None)
    distance = measure_distance(many, "float32")
    assert distance is not None
    assert (distance.trait, distance.value, distance.low, distance.high) == ("SMs", 1136.0, 20.0, 142.0)
    assert distance.factor == pytest.approx(8 / 2)
    assert str(distance) == "1,136 SMs, learned from 20 to 142"


@pytest.mark.parametrize(("sms", "tflops", "trait"), [(1000, 400.0, "L2 cache"), (1, 20.0, "float32 operations")])
def test_odd_rates_of_ones_own_gpu_are_told_and_refused_when_strict(
    sms: int, tflops: float, trait: str, tmp_path: Path
) -> None:
    model = gpuprof.build_model("mlp", tmp_path / "mlp.onnx")

    def estimate(own_sms: int, own_tflops: float, strict: bool = False) -> gpuprof.EstimateResult:
        path = tmp_path / f"own-{own_sms}.toml"
        path.write_text(ODD.format(sms=own_sms, tflops=own_tflops))
        return gpuprof.estimate([model], batches=(1, 64), device="odd", device_file=path, strict=strict)

    usual, odd = estimate(60, 20.0, strict=True), estimate(sms, tflops)
    assert usual.notes == ()
    assert any(trait in note and "is unlike the GPUs learned from" in note for note in odd.notes)
    for plain, changed in zip(usual.estimates, odd.estimates, strict=True):
        reach = (changed.latency_ms.upper() / changed.latency_ms.value) / (
            plain.latency_ms.upper() / plain.latency_ms.value
        )
        assert reach > 5.0
    with pytest.raises(InputError, match="is estimated at"):
        estimate(sms, tflops, strict=True)
