"""Wrong arguments of the Python API: each is refused as an `InputError` that names a remedy or the rule."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuprof
from gpuprof.errors import InputError
from gpuprof.pipeline.settings import Settings
from tests.export.test_export import MAP


def _demand(rate_rps: Any = 5.0, latency_ms: Any = 50.0, percentile: Any = 99.0) -> gpuprof.Demand:
    return gpuprof.Demand("net", rate_rps, gpuprof.Slo(latency_ms, percentile))


@pytest.mark.parametrize(
    ("demand", "rule"),
    [
        (_demand(-1.0), "rate_rps of 'net' must be a number from 1e-09 to 1"),
        (_demand(math.inf), "but got inf"),
        (_demand(latency_ms=0.0), "latency_ms of the SLO of 'net' must be a number above 0"),
        (_demand(latency_ms=math.inf), "but got inf"),
        (_demand(latency_ms=math.nan), "but got nan"),
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


_ANY: Any = gpuprof


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _ANY.Demand("net", 5.0, None), "slo of Demand must be a Slo but got None"),
        (lambda: _ANY.Demand("net", "x", gpuprof.Slo(5.0)), "rate_rps of Demand must be a number but got 'x'"),
        (lambda: _ANY.Demand(3, 5.0, gpuprof.Slo(5.0)), "model of Demand must be a string but got 3"),
        (lambda: _ANY.Share("half"), "sm_pct of Share must be a number but got 'half'"),
        (
            lambda: _ANY.PlanningOptions(max_batch=1.5),
            "max_batch of PlanningOptions must be a whole number but got 1.5",
        ),
        (lambda: _ANY.PlanningOptions(strict=3), "strict of PlanningOptions must be True or False but got 3"),
        (
            lambda: gpuprof.Demand("net", 5.0, gpuprof.Slo(5.0), max_replicas=0),
            "max_replicas of Demand must be greater than or equal to 1 but got 0",
        ),
        (
            lambda: _ANY.PlanningOptions(dims={"seq": 1.5}),
            "dims of PlanningOptions must be a whole number but got 1.5",
        ),
        (
            lambda: gpuprof.ServeSettings(port=70_000),
            "port of ServeSettings must be less than or equal to 65535 but got 70000",
        ),
        (lambda: gpuprof.Rescheduling(period_s=0.0), "period_s of Rescheduling must be greater than 0 but got 0"),
        (lambda: gpuprof.SimulatedTraffic(seed=-1), "seed of SimulatedTraffic must be greater than or equal to 0"),
        (lambda: gpuprof.SimulatedTraffic(duration_s=0.0), "duration_s of SimulatedTraffic must be greater than 0"),
        (lambda: _ANY.estimate(["net"], device=3), "device of EstimateOptions must be a string but got 3"),
        (
            lambda: _ANY.estimate(["net"], batches=[1.5]),
            "batches of EstimateOptions must be a whole number but got 1.5",
        ),
        (lambda: gpuprof.estimate(["net"], batches=[0]), "must be greater than or equal to 1 but got 0"),
        (lambda: _ANY.estimate(["net"], estimator=dict), "must be a string or an Estimator but got <class 'dict'>"),
        (lambda: _ANY.place(None), "demands of gpuprof.place must be a DemandFile or a Sequence or a string or a path"),
        (lambda: _ANY.record_trace({"net": -1.0}), "must be greater than or equal to 0 but got -1.0"),
        (lambda: _ANY.serve(3), "deployment of gpuprof.serve must be a DeploymentMap or a string or a path but got 3"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named_with_what_it_must_be(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as raised:
        call()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


class _Stranger:
    """What no parameter wants."""


def test_no_parameter_of_the_public_functions_and_settings_takes_what_it_is_not_annotated_with() -> None:
    checked = 0
    for name in gpuprof.__all__:
        public = getattr(gpuprof, name)
        fields = inspect.isclass(public) and (hasattr(public.__init__, "__wrapped__") or issubclass(public, Settings))
        parameters = inspect.signature(public).parameters.values() if inspect.isfunction(public) or fields else ()
        for parameter in (argument.name for argument in parameters if argument.kind is not argument.VAR_KEYWORD):
            with pytest.raises(InputError, match=f"^{parameter} of .*{name} must .* but got "):
                public(**{parameter: _Stranger()})
            checked += 1
    assert checked > 180


def test_numbers_of_numpy_and_whatever_can_be_iterated_over_are_taken(tmp_path: Path) -> None:
    options = gpuprof.PlanningOptions(max_batch=np.int64(4), confidence=np.float32(0.5), strict=np.bool_(False))
    assert [type(value) for value in (options.max_batch, options.confidence, options.strict)] == [int, float, bool]
    model = gpuprof.build_model("mlp", tmp_path / "mlp.onnx")
    listed = gpuprof.estimate([model], batches=[1, 2], device="t4").rows()
    for batches in (np.array([1, 2]), iter([1, 2]), {1: "a", 2: "b"}.keys()):
        assert gpuprof.estimate([model], batches=batches, device="t4").rows() == listed
    assert gpuprof.MapOutput(path="map.json").path == Path("map.json")


def test_what_is_right_is_passed_on_as_it_is() -> None:
    assert gpuprof.PlanningOptions(dims={"seq": 3}).dims == {"seq": 3}
    assert gpuprof.ServiceSettings(failures=["node0@1s"]).failures == ("node0@1s",)
    assert pickle.loads(pickle.dumps(gpuprof.place)) is gpuprof.place
    with pytest.raises(TypeError, match="unexpected keyword argument 'gpus'"):
        _ANY.place([_demand()], gpus="t4")


def test_what_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a report needs a source \(name a database"):
        gpuprof.report([], tmp_path / "r.html")
    with pytest.raises(InputError, match=r"no policy is named \(known: "):
        gpuprof.compare([_demand()], fleet="t4", policies=[])
    with pytest.raises(InputError, match=r"no regressor is named \(name some of lasso"):
        gpuprof.train(regressors=[], db=tmp_path)
    with pytest.raises(InputError, match=r"the map has several models \(name one: Net/A, b\)"):
        gpuprof.explain(MAP)
