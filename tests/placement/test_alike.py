from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.contract import ExponentialQueue, plain_device
from gpuprof.placement.planned_workloads import find_alike
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.segment import Segments
from tests.placement.curved import CurvedEstimator


def problem(demands: tuple[Demand, ...], spread: float = 0.0) -> Problem:
    fleet = Fleet((FleetEntry(plain_device()),))
    return Problem(demands, fleet, CurvedEstimator(spread=spread), ExponentialQueue(), Options(latency_budget=0.5))


def test_equal_demands_for_one_model_under_two_names_are_alike() -> None:
    base = Demand("m0", 100.0, Slo(50.0))
    given = (base, replace(base, model="m1"), Demand("m2", 100.0, Slo(60.0)), replace(base, model="m3", priority=1))
    assert find_alike(problem(given)) == {"m0": "m0", "m1": "m0", "m2": "m2", "m3": "m3"}


def test_equal_demands_for_two_models_are_not_alike() -> None:
    given = (Demand("m0", 100.0, Slo(50.0)), Demand("m1", 100.0, Slo(50.0)))
    assert find_alike(problem(given, spread=0.1)) == {"m0": "m0", "m1": "m1"}


def test_segments_of_one_that_is_alike_are_those_of_the_first_under_its_own_name() -> None:
    given = problem((Demand("m0", 100.0, Slo(50.0)), Demand("m1", 100.0, Slo(50.0))))
    segments, device = Segments(given), given.device("plain")
    first, second = (segments.best(demand, device) for demand in given.demands)
    assert first
    assert second == tuple(replace(item, model="m1") for item in first)
    # asked for at another rate it is looked at by itself
    more = replace(given.demands[1], rate_rps=200.0)
    assert Segments(given).best(more, device) != second


class ForgottenEstimator(CurvedEstimator):
    pass


def test_an_estimator_whose_answer_is_kept_is_kept_with_it_so_that_no_other_gets_its_id() -> None:
    given, estimator = problem((Demand("m0", 100.0, Slo(50.0)),)), ForgottenEstimator()
    find_alike(replace(given, estimator=estimator))
    forgotten = weakref.ref(estimator)
    del estimator
    assert forgotten() is not None


@dataclass(frozen=True)
class CountingEstimator(CurvedEstimator):
    """Answers for names of which those with one first letter stand for one model, and keeps who was asked for."""

    asked: list[str] = field(default_factory=list)

    def source_of(self, name: str) -> str:
        return name[0]

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        self.asked.append(model)
        return CurvedEstimator.shares(self, model, device)


def test_of_names_that_stand_for_one_model_only_the_first_is_asked_for() -> None:
    estimator = CountingEstimator()
    given = problem(tuple(Demand(name, 100.0, Slo(50.0)) for name in ("a0", "a1", "b0", "a2", "b1")))
    find_alike(replace(given, estimator=estimator))
    assert estimator.asked == ["a0", "b0"]
