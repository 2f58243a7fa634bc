from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, Sojourn
from gpuprof.errors import GpuprofError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement import limit as module
from gpuprof.placement.contract import (
    ExponentialQueue,
    LinearEstimator,
    demand,
    evidence,
    plain_device,
    problem,
    sliced_device,
    solve_and_check,
)
from gpuprof.placement.deploy import to_map
from gpuprof.placement.early_stop import early_stop
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import portfolio
from gpuprof.placement.optimal.incumbent import objective_value
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.optimal.quick_plan import make_quick_plan, place_first_fit
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import with_unplaced
from tests.placement.curved import CurvedEstimator

QUICK = ("igniter", "parvagpu", "gslice", "gpulet", "ffd")
FEW = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow], deadline=None)
ASKED = st.lists(st.tuples(st.floats(0.5, 1500.0), st.floats(4.0, 300.0)), min_size=1, max_size=5)
FLEETS = st.sampled_from([[(plain_device(), None)], [(sliced_device(), None)], [(plain_device(), 2)]])


@dataclass
class Slow:
    """A queue model by whose answers a clock goes on."""

    now_s: float = 0.0
    each_s: float = 0.01

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        self.now_s += self.each_s
        return ExponentialQueue().sojourn(arrivals, server)

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        return ExponentialQueue().pool(arrivals, servers)


def make_problem(count: int, queueing: Slow, disturbance: float, options: Options) -> Problem:
    asked = [demand(f"m{i}", 20.0 + 9.0 * i, 30.0 + 3.0 * i) for i in range(count)]
    estimator = CurvedEstimator(disturbance=disturbance)
    return replace(problem(asked, estimator=estimator, options=options), queueing=queueing)  # type: ignore[arg-type]


@FEW
@given(asked=ASKED, fleet=FLEETS, budget=st.booleans(), limit_s=st.sampled_from([None, 0.0]))
def test_it_is_sound_and_its_bound_below_what_the_search_finds(
    asked: list[tuple[float, float]], fleet: list[tuple[object, int | None]], budget: bool, limit_s: float | None
) -> None:
    options = Options(latency_budget=0.5) if budget else Options()
    wanted = [demand(f"m{i}", rate, slo) for i, (rate, slo) in enumerate(asked)]
    posed = problem(wanted, fleet, CurvedEstimator(disturbance=0.1), options)  # type: ignore[arg-type]
    placement = make_quick_plan(posed, Segments(posed), Limit(limit_s))
    assert check(to_map(posed, placement), evidence(posed)) == ()
    other, _ = solve_and_check(FirstFitDecreasing(), posed)
    if not placement.unplaced and not other.unplaced:
        assert placement.lower_bound_gpus is not None
        assert 1 <= placement.lower_bound_gpus <= min(len(other.gpus), len(placement.gpus))


def stopped_after(limit_s: float, disturbance: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Placement, Slow]:
    queueing = Slow()
    monkeypatch.setattr(portfolio, "_FEW_LOOKED_UP", 20)  # of more demands no policy is waited for
    monkeypatch.setattr(
        module, "time", SimpleNamespace(monotonic=lambda: queueing.now_s, process_time=lambda: queueing.now_s)
    )
    posed = make_problem(30, queueing, disturbance, Options(time_limit_s=limit_s))
    placement = Optimal().place(posed)
    spent = queueing.now_s
    queueing.now_s = 0.0
    assert check(to_map(posed, placement), evidence(posed)) == ()
    queueing.now_s = spent
    return placement, queueing


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", [0.0, 0.1])
def test_the_limit_holds_for_the_preparation_too(disturbance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    placement, queueing = stopped_after(5.0, disturbance, monkeypatch)
    assert placement.stopped
    assert placement.unplaced == ()
    assert queueing.now_s <= 5.0


def test_without_any_time_a_handful_of_questions_a_demand_gives_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    placement, queueing = stopped_after(1e-6, 0.1, monkeypatch)
    assert placement.stopped
    assert placement.unplaced == ()
    assert queueing.now_s <= 30 * 12 * queueing.each_s


@pytest.mark.parametrize("limit_s", [1.0, 2.0, 5.0, 30.0])
@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize("disturbance", [0.0, 0.3])
def test_where_every_question_takes_longer_than_the_limit_no_quick_policy_has_a_better_map(
    limit_s: float, budget: float | None, disturbance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(latency_budget=budget)
    best = min(objective_value(one, _place(name, one)) for name in QUICK for one in [_pose(disturbance, options)])
    clock = _Starving(limit_s)
    monkeypatch.setattr(module, "time", clock)
    given = _pose(disturbance, replace(options, time_limit_s=limit_s))
    hurried = Optimal().place(given)
    assert clock.now_s > limit_s
    assert objective_value(given, hurried) <= best
    assert check(to_map(given, hurried), evidence(given)) == ()


def _set_clock(monkeypatch: pytest.MonkeyPatch, queueing: Slow) -> None:
    clock = SimpleNamespace(monotonic=lambda: queueing.now_s, process_time=lambda: queueing.now_s)
    monkeypatch.setattr(module, "time", clock)


def test_where_figures_are_predicted_no_policy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    queueing = Slow(each_s=0.1)
    _set_clock(monkeypatch, queueing)
    asked = [demand(f"m{i}", 60.0 + 90.0 * i, 25.0 + 9.0 * i) for i in range(7)]
    posed = problem(asked, estimator=LinearEstimator(source="roofline"), options=Options(time_limit_s=4.0))
    Optimal().place(replace(posed, queueing=queueing))
    predicted, queueing.now_s = queueing.now_s, 0.0
    measured = problem(asked, estimator=LinearEstimator(), options=posed.options)
    Optimal().place(replace(measured, queueing=queueing))
    assert predicted <= 4.0 + 7 * 12 * queueing.each_s < queueing.now_s


def _pose_predicted(queueing: Slow, limit_s: float | None) -> Problem:
    asked = [demand("a", 300.0, 40.0), demand("b", 700.0, 60.0), demand("c", 90.0, 30.0)]
    options = Options(time_limit_s=limit_s)
    posed = problem(asked, [(plain_device(), 2)], LinearEstimator(source="roofline"), options)
    return replace(posed, queueing=queueing)


@pytest.mark.parametrize("limit_s", [1e-3, 1.0, 2.0, 5.0, 30.0])
def test_of_few_demands_whose_figures_are_predicted_no_quick_policy_has_a_better_map(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = min(objective_value(one, _place(name, one)) for name in QUICK for one in [_pose_predicted(Slow(), None)])
    queueing = Slow(each_s=0.01)
    _set_clock(monkeypatch, queueing)
    posed = _pose_predicted(queueing, limit_s)
    found = Optimal().place(posed)
    assert objective_value(posed, found) <= best
    assert not found.unfinished


def test_policies_that_the_limit_ended_are_named_and_there_is_a_map_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queueing = Slow(each_s=0.4)
    _set_clock(monkeypatch, queueing)
    posed = _pose_predicted(queueing, 1.0)
    found = Optimal().place(posed)
    assert found.stopped and "ffd" in found.unfinished
    assert found.gpus
    queueing.now_s = 0.0
    made = to_map(posed, found)
    assert check(made, evidence(posed)) == ()
    assert "ffd" in str(early_stop(made, 1.0)) and "may be better" in str(early_stop(made, 1.0))


class _Starving:
    """A clock that whoever looks at it finds later by more than the limit: what runs gets no cores."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self._step_s = 0.0, step_s

    def process_time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        self.now_s += self._step_s
        return self.now_s


def _pose(disturbance: float, options: Options) -> Problem:
    asked = [demand(f"m{i}", 60.0 + 90.0 * i, 25.0 + 9.0 * i) for i in range(7)]
    return problem(asked, estimator=CurvedEstimator(disturbance=disturbance), options=options)  # type: ignore[arg-type]


def _place(name: str, given: Problem) -> Placement:
    try:
        return make_policy(name).place(given)
    except GpuprofError:  # not made for such a fleet
        return with_unplaced(given, Segments(given), Placement(name, ()))


@pytest.mark.parametrize("seconds", [0.001, 0.3])
def test_no_limit_makes_it_worse_than_a_quick_policy(seconds: float) -> None:
    asked = [demand(f"m{i}", 20.0 + 7.0 * i, 60.0 + 5.0 * i) for i in range(12)]
    given = problem(asked, options=Options(latency_budget=0.5))
    quick = [make_policy(name).place(given) for name in ("igniter", "gslice", "ffd")]
    best = min(len(one.gpus) for one in quick if not one.unplaced)
    hurried = Optimal().place(replace(given, options=replace(given.options, time_limit_s=seconds)))
    assert hurried.unplaced == ()
    assert len(hurried.gpus) <= (best if seconds > 0.1 else len(quick[0].gpus))


@dataclass(frozen=True, slots=True)
class _Proportional(CurvedEstimator):
    """Shares do as much as they have units, whether those are of an instance or of the whole device."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        found = CurvedEstimator.estimate(self, model, device, batch, Share())
        time = replace(found.latency_ms, value=2.0 * processes / device.fraction(share), low=None, high=None)
        return replace(found, workload=Workload(model, batch, share, processes), latency_ms=time)


def test_instances_and_shares_of_the_whole_that_do_as_much_are_compared() -> None:
    asked = [demand("m0", 90_000.0, 50.0)]  # more than any of them serves, so that the most efficient is looked for
    posed = problem(asked, [(sliced_device(), None)], _Proportional())  # type: ignore[arg-type]
    assert make_quick_plan(posed, Segments(posed), Limit()).gpus


@pytest.mark.parametrize("slo_ms", [8.0, 12.0, 16.0, 20.0, 25.0, 30.0])
def test_of_what_no_replica_serves_alone_each_serves_nearly_as_much_for_its_share_as_any_would(slo_ms: float) -> None:
    asked = demand(rate_rps=20_000.0, slo_ms=slo_ms)
    given_problem = replace(problem([asked]), estimator=CurvedEstimator(), queueing=BatchQueue())
    segments, device = Segments(given_problem), given_problem.fleet.entries[0].device
    every = [
        made
        for share in given_problem.estimator.shares(asked.model, device)
        for workload in segments.workloads(asked.model, device, share)
        if (made := segments.make(asked, device, workload)) is not None
    ]
    most = max(one.capacity_rps / device.fraction(one.share) for one in every)
    placed = place_first_fit(given_problem, Segments(given_problem), Limit())
    replicas = [one for gpu in placed.gpus for one in gpu.replicas()]
    served = sum(one.rate_rps for one in replicas) / sum(device.fraction(one.share) for one in replicas)
    assert served >= 0.6 * most
