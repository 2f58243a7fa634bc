import pytest

from bench.gpu.launches import _sum_ms


def test_the_time_of_a_batch_is_the_mean_of_those_recorded_of_its_own_run() -> None:
    def kernel(run_id: str, repeat: int, name: str, ns: int) -> dict[str, object]:
        return {"run_id": run_id, "batch": 4, "repeat": repeat, "name": name, "duration_ns": ns}

    kernels = [
        kernel("a", 0, "gemm", 2_000_000),
        kernel("a", 1, "gemm", 4_000_000),
        kernel("a", 1, "bias_kernel", 500_000),
        kernel("b", 0, "gemm", 9_000_000),
        {**kernel("a", 0, "gemm", 9_000_000), "batch": 8},
    ]
    row = {"run_id": "a", "batch": 4}
    assert _sum_ms(row, kernels) == pytest.approx(3.25)
    assert _sum_ms(row, kernels, "bias") == pytest.approx(0.25)
    assert _sum_ms({"run_id": "c", "batch": 4}, kernels) == 0.0
