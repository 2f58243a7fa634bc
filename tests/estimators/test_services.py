from __future__ import annotations

from gpuprof.domain.estimate import Workload
from gpuprof.domain.failure import FailedRun, TriedRuns
from gpuprof.domain.share import Share
from gpuprof.estimators.services import ServiceEstimator, name_services, name_tried_services
from gpuprof.placement.contract import demand as contract_demand
from gpuprof.placement.contract import problem

PROBLEM = problem([contract_demand("m")])
DEVICE = PROBLEM.fleet.entries[0].device
SHARE = Share(100.0)


class RecordingEstimator:
    """Passes on to the contract's estimator, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self._inner = PROBLEM.estimator

    def estimate(self, model, device, batch, share, beside=(), processes=1):  # type: ignore[no-untyped-def]
        self.asked.append((model, [one.model for one in beside]))
        return self._inner.estimate(model, device, batch, share, beside, processes)

    def batches(self, model, device, share):  # type: ignore[no-untyped-def]
        return self._inner.batches(model, device, share)

    def shares(self, model, device):  # type: ignore[no-untyped-def]
        return self._inner.shares(model, device)


def test_a_service_is_its_model_under_another_name() -> None:
    inner = RecordingEstimator()
    services = ServiceEstimator(inner, {"fast": "m", "slow": "m"})
    (share, *_) = services.shares("fast", DEVICE)
    (batch, *_) = services.batches("slow", DEVICE, share)
    found = services.estimate("fast", DEVICE, batch, share, [Workload("slow", batch, share, 1)])
    assert inner.asked == [("m", ["m"])]
    assert found.workload.model == "fast"
    alone = PROBLEM.estimator.estimate("m", DEVICE, batch, share)
    assert services.estimate("slow", DEVICE, batch, share).latency_ms == alone.latency_ms


def test_where_services_are_called_as_their_models_nothing_is_put_between() -> None:
    assert name_services(PROBLEM.estimator, {"m": "m"}) is PROBLEM.estimator


def test_what_failed_of_a_model_failed_of_each_of_its_services() -> None:
    failed, ran = Workload("m", 32, SHARE, 1), Workload("other", 4, SHARE, 1)
    tried = TriedRuns((FailedRun("d", failed, "out of memory"),), frozenset({("d", ran)}))
    named = name_tried_services(tried, {"fast": "m", "slow": "m", "other": "other"})
    assert [one.workload.model for one in named.failed] == ["fast", "slow"]
    assert named.measured == tried.measured
