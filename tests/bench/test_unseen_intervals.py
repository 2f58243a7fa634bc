"""Intervals fitted by leaving GPUs out hold nine of ten times on a GPU like those, and are wider before Volta."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bench.unseen_intervals import OpResiduals, fit_op_scales, fit_scales, print_intervals, widen_ops
from bench.unseen_models import ModelDeviation
from gpuprof.estimators.cross_gpu.cross_gpu import TimeParts

SIGMA = {"product": 0.1, "softmax": 0.3}
GPUS = {"v100": "", "t4": "", "a100-80": "", "h100": "", "p4": " old", "p100": " old"}


def _residuals(gpu: str, seed: int, worse: float = 1.0) -> list[OpResiduals]:
    random = np.random.default_rng(seed)
    residuals = []
    for kind, sigma in SIGMA.items():
        for part in range(3):
            sizes = np.abs(random.normal(0.0, sigma * worse, 400))
            residuals.append(
                OpResiduals(gpu.removesuffix("-80"), GPUS[gpu], f"{kind} {part}", np.full(400, kind), sizes)
            )
    return residuals


def _groups() -> list[OpResiduals]:
    return [
        group
        for seed, (gpu, generation) in enumerate(GPUS.items())
        for group in _residuals(gpu, seed, 3.0 if generation else 1.0)
    ]


def _models(gpu: str, error: float, *, host: bool = False) -> list[ModelDeviation]:
    parts = TimeParts(1e-3, 2e-3 if host else 0.0, {"product": 1e-3})
    measured = parts.total_s * 1e3 * float(np.exp(error))
    return [ModelDeviation("x", gpu, f"m{i}", "eager", "products cores", 1, measured, parts) for i in range(10)]


def test_scales_are_the_errors_that_nine_of_ten_ops_keep_within() -> None:
    scales = fit_op_scales(_groups()[:12])
    for kind, sigma in SIGMA.items():
        assert scales[kind] == pytest.approx(1.645 * sigma, rel=0.1)


def test_nine_of_ten_ops_of_one_more_gpu_are_inside() -> None:
    scales = fit_scales(_groups(), [])
    for group in _residuals("v100", 99):
        inside = group.sizes <= widen_ops(scales, group.kinds, "")
        assert 0.85 < inside.mean() < 0.96
    assert scales.op_factors[" old"] == pytest.approx(3 * scales.op_factors[""], rel=0.3)


def test_models_are_held_by_as_many_scales_as_those_on_gpus_left_out() -> None:
    models = [*_models("v100", 0.02), *_models("t4", -0.05)]
    scales = fit_scales(_groups(), models)
    assert scales.model_factors["products cores"] == pytest.approx(0.05 / scales.ops["product"], rel=0.1)
    widened = scales.widen_model(models[0].parts, "products cores", "")
    assert np.log(np.array(widened) / models[0].parts.total_s) == pytest.approx((-0.05, 0.05), rel=0.1)


@pytest.mark.parametrize(
    ("odd", "held"),
    [([0.3] * 10, True), ([0.01] * 7 + [0.3] * 3, True), ([0.3] * 5, False), ([0.01] * 9 + [0.3], False)],
)
def test_eight_of_ten_models_of_each_long_table_are_held(odd: list[float], held: bool) -> None:
    alike = [0.01] * 30
    tables = {"a100-80": alike, "h100": alike, "t4": alike, "v100": odd}
    models = [
        replace(_models(gpu, error)[0], model=f"m{place}")
        for gpu, errors in tables.items()
        for place, error in enumerate(errors)
    ]
    scales = fit_scales(_groups(), models)
    error = 0.3 if held else 0.01
    assert scales.model_factors["products cores"] == pytest.approx(error / scales.ops["product"], rel=0.1)


def test_hosts_are_as_far_from_the_others_as_those_of_the_same_runtime() -> None:
    hosts = [*_models("v100", 0.5, host=True), *_models("t4", 0.1, host=True), *_models("h100", 0.3, host=True)]
    other_runtime = [replace(model, runtime="onnxruntime") for model in _models("t4", 2.0, host=True)]
    scales = fit_scales(_groups(), [*hosts, *other_runtime, *_models("t4", 0.01)])
    assert scales.host == pytest.approx(0.3, abs=1e-4)
    assert scales.model_factors["products cores"] < 0.1  # models that wait for the host tell nothing of kernels
    assert fit_scales(_groups(), hosts[:10]).host == pytest.approx(math.log(2.0), abs=1e-4)  # a single host


def test_errors_within_the_spread_of_hosts_do_not_widen_the_kernels() -> None:
    parts = TimeParts(1e-3, 0.9e-3, {"product": 1e-3})
    hosts = [*_models("v100", 0.3, host=True), *_models("t4", 0.0, host=True)]
    late = [replace(model, parts=parts, measured_ms=1.5) for model in _models("a100-80", 0.0)]
    assert math.hypot(1.0, 0.9 * math.exp(0.3)) > 1.5
    assert fit_scales(_groups(), [*hosts, *late]).model_factors["products cores"] == 0.0


def test_a_gpu_is_judged_without_its_own_errors(capsys: pytest.CaptureFixture[str]) -> None:
    groups = [*_groups()[:18], *_residuals("h100", 7, worse=5.0)]
    print_intervals(groups, [*_models("v100", 0.02), *_models("t4", 0.03), *_models("h100", 1.0)])
    out = capsys.readouterr().out
    assert "models, the architecture left out" in out
    ops = next(line for line in out.splitlines() if line.startswith("  ALL"))
    assert float(ops.split()[1].rstrip("%")) < 85.0  # the odd GPU is outside: its errors widened nothing of its own
