"""What must hold for any demands, fleet and estimator; the estimator is curved, disturbs, and answers between lists."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.errors import GpuprofError
from gpuprof.placement.contract import ExponentialQueue, plain_device, sliced_device, solve_and_check
from gpuprof.placement.optimal.judge import bound_by_time
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu, Placement
from gpuprof.placement.policies import BUILTIN, make_policy
from gpuprof.placement.problem import Options, Problem
from tests.placement.curved import CurvedEstimator
from tests.placement.drawn_problems import (
    KINDS,
    Kind,
    TooLargeError,
    best_of,
    count_equal,
    draw_problem,
    draw_queued,
    is_bound_false,
    is_called_best,
    loss_of,
)

FEW = settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow], deadline=None)
DEVICES = {
    "plain": plain_device(),
    "sliced": sliced_device(),
    "big": replace(plain_device("big", 1.7), dram_bytes=2**36),
    "cores": replace(plain_device("cores"), kind="cpu", compute_units=8),
    "more_cores": replace(plain_device("more_cores", 1.7), kind="cpu", compute_units=16),
}

ESTIMATORS = st.builds(
    CurvedEstimator,
    start_ms=st.floats(0.1, 3.0),
    each_ms=st.floats(0.1, 2.0),
    bend=st.floats(0.5, 1.1),
    yields=st.floats(0.4, 1.0),
    spread=st.floats(0.0, 1.0),
    weight_mib=st.sampled_from([100, 2000]),
    disturbance=st.sampled_from([0.0, 0.1, 0.5]),
    sizes=st.sampled_from([(1, 2, 4, 8, 16), (1, 4, 16), (1, 2, 3, 4), (2, 8, 32)]),
    gaps=st.booleans(),
    percents=st.sampled_from([(20.0, 40.0, 60.0, 80.0, 100.0), (100.0,), (25.0, 50.0, 100.0)]),
)
DEMANDS = st.lists(
    st.tuples(st.floats(1.0, 800.0), st.floats(8.0, 200.0), st.sampled_from([50.0, 95.0, 99.0])), min_size=1, max_size=4
)
OPTIONS = st.builds(
    Options,
    latency_budget=st.sampled_from([None, 0.5, 1.0]),
    confidence=st.sampled_from([None, 0.9]),
    max_processes=st.sampled_from([None, 1, 2]),
)


@dataclass(frozen=True)
class Drawn:
    """A problem but for its fleet."""

    asked: list[tuple[float, float, float]]
    estimator: CurvedEstimator
    options: Options

    def on(self, fleet: dict[str, int | None], looser: float = 1.0) -> Problem:
        demands = (Demand(f"m{i}", rate, Slo(ms * looser, pct)) for i, (rate, ms, pct) in enumerate(self.asked))
        entries = tuple(FleetEntry(DEVICES[name], count) for name, count in fleet.items())
        return Problem(tuple(demands), Fleet(entries), self.estimator, ExponentialQueue(), self.options)


DRAWN = st.builds(Drawn, DEMANDS, ESTIMATORS, OPTIONS)
ELASTIC = st.sampled_from([("plain",), ("sliced",), ("plain", "sliced"), ("big", "plain")])
FLEETS = ELASTIC.flatmap(lambda names: st.fixed_dictionaries({name: st.none() | st.integers(1, 3) for name in names}))


#: Shares and batches so few that all that can stand together is listed, neighbours regarded.
LISTED = st.builds(
    Drawn,
    st.lists(st.tuples(st.floats(1.0, 400.0), st.floats(8.0, 200.0), st.just(95.0)), min_size=1, max_size=2),
    st.builds(
        CurvedEstimator,
        start_ms=st.floats(0.1, 3.0),
        each_ms=st.floats(0.1, 2.0),
        yields=st.floats(0.4, 1.0),
        spread=st.floats(0.0, 1.0),
        weight_mib=st.sampled_from([100, 6000]),
        disturbance=st.sampled_from([0.1, 0.5, 1.0]),
        sizes=st.sampled_from([(1, 4), (1, 4, 16), (2, 8)]),
        gaps=st.just(False),
        percents=st.sampled_from([(25.0, 50.0, 100.0), (50.0, 100.0), (40.0, 60.0)]),
    ),
    st.builds(Options, latency_budget=st.sampled_from([0.5, 1.0]), confidence=st.sampled_from([None, 0.9])),
)
CORES = st.sampled_from([("cores",), ("cores", "more_cores")])


def cost(placement: Placement) -> float:
    return sum(DEVICES[gpu.device].price_per_hour or 0.0 for gpu in placement.gpus)


def missing(placement: Placement) -> float:
    return round(sum(shortfall.rate_rps for shortfall in placement.unplaced), 3)


@pytest.mark.slow
@FEW
@given(drawn=DRAWN, fleet=FLEETS)
def test_every_map_is_sound_and_none_beats_optimal_or_a_bound(drawn: Drawn, fleet: dict[str, int | None]) -> None:
    hold_optimal_against_all(drawn, fleet)


@FEW
@given(drawn=LISTED, names=CORES, count=st.none() | st.integers(1, 3))
def test_no_map_is_better_than_optimal_or_goes_below_a_bound_that_knows_of_neighbours(
    drawn: Drawn, names: tuple[str, ...], count: int | None
) -> None:
    hold_optimal_against_all(drawn, dict.fromkeys(names, count))


def are_shares_listed(given: Problem, gpu: PlacedGpu) -> bool:
    """Whether all shares on a device are among those that the estimator lists."""
    device = DEVICES[gpu.device]
    return all(replica.share in given.estimator.shares(replica.model, device) for replica in gpu.replicas())


def hold_optimal_against_all(drawn: Drawn, fleet: dict[str, int | None]) -> None:
    given = drawn.on(fleet)
    best, _ = solve_and_check(Optimal(), given)
    for name in sorted(set(BUILTIN) - {"optimal"}):
        try:
            placement, deployment = solve_and_check(make_policy(name), given)
        except GpuprofError:
            continue  # not made for such a fleet
        if any(DEVICES[gpu.device].kind == "cpu" and not are_shares_listed(given, gpu) for gpu in placement.gpus):
            continue  # policies for GPUs give any share, which is not on a CPU's menu
        # within a thousandth of its bound the search ends
        assert missing(best) <= missing(placement) + 2e-3 * sum(rate for rate, *_ in drawn.asked), name
        if not placement.unplaced:
            assert cost(best) <= cost(placement) * (1.0 + 2e-3), name
            assert (best.lower_bound_gpus or 0) <= len(placement.gpus), name
            assert (best.lower_bound_cost_per_hour or 0.0) <= cost(placement) + 1e-6, name
        if best.upper_bound_goodput_rps is not None:
            assert deployment.predicted.goodput_rps <= best.upper_bound_goodput_rps * (1.0 + 1e-6), name


@FEW
@given(drawn=LISTED, count=st.integers(1, 2), more=st.integers(1, 2))
def test_more_devices_never_lower_the_goodput_where_all_is_listed(drawn: Drawn, count: int, more: int) -> None:
    few, many = (solve_and_check(Optimal(), drawn.on({"cores": n}))[0] for n in (count, count + more))
    assert missing(many) <= missing(few) + 1e-3 * sum(rate for rate, *_ in drawn.asked)


def costs(drawn: Drawn, names: tuple[str, ...], looser: float) -> tuple[float, float]:
    """Return what the tight and the looser problem cost, infinity where not everything could be placed."""
    plans = [solve_and_check(Optimal(), drawn.on(dict.fromkeys(names), factor))[0] for factor in (1.0, looser)]
    tight, loose = (float("inf") if plan.unplaced else cost(plan) for plan in plans)
    return tight, loose


@FEW
@given(drawn=LISTED, names=CORES, looser=st.floats(1.0, 3.0))
def test_a_looser_slo_never_costs_more_beside_neighbours_where_all_that_can_stand_together_is_listed(
    drawn: Drawn, names: tuple[str, ...], looser: float
) -> None:
    tight, loose = costs(drawn, names, looser)
    assert loose <= tight + 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_no_map_does_better_than_a_bound_allows(kind: Kind, seed: int) -> None:
    problem = draw_problem(kind, seed)
    try:
        best = best_of(problem)
    except TooLargeError:
        pytest.skip("more than can be listed")
    placement, _ = solve_and_check(Optimal(), problem)
    assert not is_bound_false(placement, best)
    loss = loss_of(problem, placement, best)
    assert loss > -1e-6, "the listing missed a map"
    assert loss < 1e-6 or not is_called_best(problem, placement)
    if kind.startswith("beside"):
        assert loss < 1e-6


@pytest.mark.parametrize("seed", [60, 67, 92, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 9))])
def test_no_map_of_equal_replicas_takes_fewer_devices_than_a_plan_by_queues_or_its_bound(seed: int) -> None:
    problem = draw_queued(seed)
    placement, _ = solve_and_check(Optimal(), problem)
    assert not placement.unplaced
    assert (placement.lower_bound_gpus or 0) <= len(placement.gpus) <= count_equal(problem)


def test_batches_that_are_hardly_ever_in_time_overflow_no_bound() -> None:
    with np.errstate(over="raise"):
        assert bound_by_time(draw_queued(94)).gpus > 0


def test_scarce_devices_are_filled_as_by_first_fit() -> None:
    estimator = CurvedEstimator(
        start_ms=1.0, each_ms=0.638, bend=0.867, yields=1.0, spread=0.757, weight_mib=2000, disturbance=0.5, gaps=False
    )
    asked = [(107.6, 17.63, 99.0), (338.1, 64.55, 99.0), (95.4, 90.24, 99.0), (698.5, 161.1, 99.0)]
    drawn = Drawn(asked, estimator, Options(confidence=0.9, latency_budget=1.0, max_processes=1))
    hold_optimal_against_all(drawn, {"plain": 2, "big": 2})
