from __future__ import annotations

import numpy as np
import pytest

from gpuprof.domain.deployment import DeployedModel, DeploymentMap, MapPrediction, RequestedModel
from gpuprof.errors import InputError
from gpuprof.simulator.load import arrivals_of_rates, arrivals_of_trace
from gpuprof.simulator.trace import Trace


def test_the_requests_of_all_members_of_a_merged_model_are_its_own() -> None:
    members = {"a": RequestedModel(rate_rps=30.0, slo_ms=50.0), "b": RequestedModel(rate_rps=10.0, slo_ms=20.0)}
    model = DeployedModel(rate_rps=40.0, slo_ms=20.0, members=members)
    deployment = DeploymentMap(
        policy="by hand", models={"ab": model}, nodes=(), predicted=MapPrediction(gpus=0, goodput_rps=0.0)
    )
    assert arrivals_of_rates(deployment, {"a": 5.0}, None, 1.0, "poisson")["ab"].rate_rps == 15.0
    with pytest.raises(InputError, match="unknown model 'ab'"):
        arrivals_of_rates(deployment, {"ab": 5.0}, None, 1.0, "poisson")
    trace = Trace({"a": np.array([1, 5, 9]), "b": np.array([2, 7])}, 1.0)
    assert trace.join(deployment.serving).times["ab"].tolist() == [1, 2, 5, 7, 9]
    assert list(arrivals_of_trace(deployment, trace)) == ["ab"]
