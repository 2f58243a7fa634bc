from __future__ import annotations

import pytest

from gpuprof.domain.estimate import Estimate, FailedRun, Figure, TriedRuns, Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import split_name
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
        self.asked.append((model, [neighbour.model for neighbour in beside]))
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
    estimate = services.estimate("fast", DEVICE, batch, share, [Workload("slow", batch, share, 1)])
    assert inner.asked == [("m", ["m"])]
    assert estimate.workload.model == "fast"
    alone = PROBLEM.estimator.estimate("m", DEVICE, batch, share)
    assert services.estimate("slow", DEVICE, batch, share).latency_ms == alone.latency_ms


def test_where_services_are_called_as_their_models_nothing_is_put_between() -> None:
    assert name_services(PROBLEM.estimator, {"m": "m"}) is PROBLEM.estimator


def test_what_failed_of_a_model_failed_of_each_of_its_services() -> None:
    failed, ran = Workload("m", 32, SHARE, 1), Workload("other", 4, SHARE, 1)
    tried = TriedRuns((FailedRun("d", failed, "out of memory"),), frozenset({("d", ran)}))
    named = name_tried_services(tried, {"fast": "m", "slow": "m", "other": "other"})
    assert [run.workload.model for run in named.failed] == ["fast", "slow"]
    assert named.measured == tried.measured


def test_what_ran_together_is_told_of_services_where_anything_failed_beside_others_and_else_not() -> None:
    pair = Workload("m", 1, SHARE, 1), Workload("n", 1, SHARE, 1)
    together = frozenset({("d", pair)})
    sources = {"a": "m", "b": "m", "n": "n"}
    alone = TriedRuns((FailedRun("d", pair[0], "out of memory"),), together=together)
    assert not name_tried_services(alone, sources).together
    beside = TriedRuns((FailedRun("d", pair[0], "out of memory", pair[1:]),), together=together)
    named = {tuple(run.model for run in ran) for _, ran in name_tried_services(beside, sources).together}
    assert named == {("a", "n"), ("b", "n")}


def test_requests_of_two_sizes_take_what_each_takes_by_how_many_have_it() -> None:
    inner = SizedEstimator({64: 1.0, 256: 4.0})
    services = ServiceEstimator(inner, {"s": "m[seq=64:0.75|seq=256:0.25]"})
    estimate = services.estimate("s", DEVICE, 1, SHARE)
    assert estimate.workload.model == "s"
    assert estimate.latency_ms.value == pytest.approx(0.75 * 1.0 + 0.25 * 4.0)
    variance = 0.75 * 1.0 + 0.25 * 16.0 - 1.75**2
    assert estimate.latency_cv == pytest.approx(variance**0.5 / 1.75)
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value == 256


def test_a_batch_of_two_sizes_is_a_batch_of_each() -> None:
    inner = SizedEstimator({64: 1.0, 256: 4.0}, per_row=0.5)
    services = ServiceEstimator(inner, {"s": "m[seq=64:0.5|seq=256:0.5]"})
    latency = services.estimate("s", DEVICE, 8, SHARE).latency_ms
    chance = 1.0 - 0.5**8
    # Each size is there with this chance; its fixed time once, and half the rows of each, whatever the chance.
    assert latency.value == pytest.approx(chance * (0.5 + 3.5) + 0.5 * 8)
    assert latency.low is not None and latency.low < latency.value < latency.upper()
    assert {name for name, _ in inner.asked} == {"m[seq=64]", "m[seq=256]"}


def test_what_failed_of_one_size_failed_of_a_service_that_sends_it() -> None:
    failed, ran = Workload("m[seq=256]", 32, SHARE, 1), Workload("m[seq=64]", 32, SHARE, 1)
    tried = TriedRuns((FailedRun("d", failed, "out of memory"),), frozenset({("d", ran)}))
    named = name_tried_services(tried, {"s": "m[seq=64:0.5|seq=256:0.5]", "short": "m[seq=64]"})
    assert [run.workload.model for run in named.failed] == ["s"]
    assert [workload.model for _, workload in named.measured] == ["short"]


class SizedEstimator:
    """Knows what each size of a model takes: a fixed time, and more for each row after the first."""

    def __init__(self, fixed_ms: dict[int, float], per_row: float = 0.0) -> None:
        self.asked: list[tuple[str, int]] = []
        self._fixed, self._per_row = fixed_ms, per_row

    def estimate(self, model, device, batch, share, beside=(), processes=1):  # type: ignore[no-untyped-def]
        self.asked.append((model, batch))
        seq = dict(split_name(model)[1])["seq"]
        value = self._fixed[seq] + self._per_row * (batch - 1)
        return Estimate(
            Workload(model, batch, share, processes),
            device.name,
            Figure(value, "measured", 0.9 * value, 1.1 * value),
            memory_bytes=Figure(seq, "measured"),
        )

    def batches(self, model, device, share):  # type: ignore[no-untyped-def]
        return (1, 2)

    def shares(self, model, device):  # type: ignore[no-untyped-def]
        return (SHARE,)
