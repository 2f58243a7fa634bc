"""Wrong arguments of the Python API: each is refused as an `InputError` that names a remedy or the rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuprof
from gpuprof.errors import InputError
from tests.placement.test_export import MAP


def _demand(rate_rps: Any = 5.0, latency_ms: Any = 50.0, percentile: Any = 99.0) -> gpuprof.Demand:
    return gpuprof.Demand("net", rate_rps, gpuprof.Slo(latency_ms, percentile))


@pytest.mark.parametrize(
    ("demand", "rule"),
    [
        (_demand(-1.0), "rate_rps of 'net' must be a number from 1e-09 to 1"),
        (_demand(math.nan), "but got nan"),
        (_demand(math.inf), "but got inf"),
        (_demand("5"), "but got '5'"),
        (_demand(latency_ms=0.0), "latency_ms of the SLO of 'net' must be a number above 0"),
        (_demand(latency_ms=math.nan), "but got nan"),
        (_demand(latency_ms=math.inf), "but got inf"),
        (_demand(percentile=100.0), "percentile of the SLO of 'net' must be a number from 1 to 99.999 but got 100"),
        (_demand(percentile=0.99), "but got 0.99"),
    ],
)
def test_a_demand_that_no_service_can_have_is_refused_before_anything_is_planned(
    demand: gpuprof.Demand, rule: str
) -> None:
    verbs: list[Callable[[], object]] = [
        lambda: gpuprof.place([demand], fleet="t4"),
        lambda: gpuprof.compare([demand], fleet="t4", policies=["ffd"]),
        lambda: gpuprof.check(MAP, against=[demand]),
    ]
    for verb in verbs:
        with pytest.raises(InputError) as raised:
            verb()
        assert rule in str(raised.value)


def test_what_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a report needs a source \(name a database"):
        gpuprof.report([], tmp_path / "r.html")
    with pytest.raises(InputError, match=r"no policy is named \(known: "):
        gpuprof.compare([_demand()], fleet="t4", policies=[])
    with pytest.raises(InputError, match=r"no regressor is named \(name some of lasso"):
        gpuprof.train(regressors=[], db=tmp_path)
    with pytest.raises(InputError, match=r"the map has several models \(name one: Net/A, b\)"):
        gpuprof.explain(MAP)


def test_one_source_and_one_regressor_need_no_list(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(MAP.to_json())
    assert gpuprof.report(str(tmp_path / "map.json"), tmp_path / "r.html").sections
    with pytest.raises(InputError, match="unknown regressor 'ridge'"):
        gpuprof.train(regressors="ridge", db=tmp_path)


def test_one_model_needs_no_list(tmp_path: Path) -> None:
    model = gpuprof.build_model("mlp", tmp_path / "mlp.onnx")
    one, listed = (gpuprof.estimate(given, device="t4").rows() for given in (str(model), [model]))
    assert one == listed
    with pytest.raises(InputError, match=r"there is no model file nowhere\.onnx"):
        gpuprof.profile("nowhere.onnx", device="cpu", db=tmp_path / "db")


@pytest.mark.parametrize(
    ("batches", "rule"), [([], "needs a batch size"), ([1.5], "whole number from 1 to"), ([0], "got 0")]
)
def test_batches_that_are_none_are_refused(tmp_path: Path, batches: Any, rule: str) -> None:
    model = gpuprof.build_model("mlp", tmp_path / "mlp.onnx")
    with pytest.raises(InputError, match=rule):
        gpuprof.estimate([model], batches=batches, device="t4")


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan, math.inf])
def test_simulated_time_has_a_length(duration_s: float) -> None:
    with pytest.raises(InputError, match="a duration must be above 0 s and finite"):
        gpuprof.SimulatedTraffic(duration_s=duration_s)


def test_a_seed_is_no_negative_number() -> None:
    with pytest.raises(InputError, match="a seed must be a whole number from 0 but got -1"):
        gpuprof.SimulatedTraffic(seed=-1)
