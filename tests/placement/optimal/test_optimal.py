import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeploymentMap, Unplaced
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import EXTRAPOLATED, MEASURED, Estimate, Estimator, Figure, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import name_services
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, sliced_device, solve_and_check
from gpuprof.placement.deploy import to_map
from gpuprof.placement.device_assignment import assign_devices
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import optimal
from gpuprof.placement.optimal.candidates import CandidateSegments, Choices
from gpuprof.placement.optimal.contents import Contents
from gpuprof.placement.optimal.judge import Judge, TimeBounds, bound_by_time
from gpuprof.placement.optimal.optimal import MeasuredOnly, Optimal, restrict_to_measured
from gpuprof.placement.optimal.program_plan import plan_by_program
from gpuprof.placement.optimal.shared_workers import share_workers
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.pool import Pools
from gpuprof.placement.problem import Options, Problem, collect_evidence
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.igniter import Igniter
from gpuprof.placement.segment import Segments, SharedSegments
from tests.placement.drawn_problems import draw_queued
from tests.placement.table import LaunchBound, TabledEstimator

OPTIMAL = Optimal()
BUDGET = Options(latency_budget=0.5, max_processes=3)
_PERCENTS = (10.0, 20.0, 30.0, 50.0, 70.0, 80.0, 100.0)


def demands(targets: list[tuple[float, float]]) -> list[Demand]:
    return [demand(f"m{i}", rate, slo) for i, (rate, slo) in enumerate(targets)]


def cost(placement: Placement) -> float:
    prices = {"plain": 1.0, "sliced": 4.0, "big": 3.0}
    return sum(prices[gpu.device] for gpu in placement.gpus)


def shares(percents: dict[str, float], rate: float = 100.0) -> TabledEstimator:
    return TabledEstimator({Workload(model, 1, Share(pct), 1): rate for model, pct in percents.items()})


def test_what_first_fit_decreasing_wastes_is_used() -> None:
    # the classic: 35+35+30 twice is two devices, first fit decreasing begins with 35+35 and 30
    percents = {"a": 44.0, "b": 44.0, "c": 28.0, "d": 28.0, "e": 28.0, "f": 28.0}
    given = problem([demand(model, 90.0, 30.0) for model in percents], options=BUDGET)
    given = replace(given, estimator=shares(percents))
    best, _ = solve_and_check(OPTIMAL, given)
    first_fit, _ = solve_and_check(FirstFitDecreasing(), given)
    assert (len(best.gpus), len(first_fit.gpus)) == (2, 3)
    assert best.lower_bound_gpus == 2


def test_a_lone_model_gets_the_smallest_share_that_serves_it() -> None:
    rates = {Workload("a", 1, Share(pct)): 2.0 * pct for pct in (25.0, 50.0, 100.0)}
    given = replace(problem([demand("a", 80.0, 100.0)], options=BUDGET), estimator=TabledEstimator(rates))
    placement, _ = solve_and_check(OPTIMAL, given)
    (partition,) = placement.gpus[0].partitions
    assert [replica.share.sm_pct for replica in partition.replicas] == [50.0]


@dataclass(frozen=True)
class SlowedEstimator(TabledEstimator):
    """Knows that any neighbours make a batch take half as long again, and says so."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        estimate = super().estimate(model, device, batch, share, beside, processes)
        return replace(estimate, latency_ms=estimate.latency_ms.scale_by(1.5)) if beside else estimate

    def least_beside(self, model: str, device: Device, alone: Figure) -> Figure:
        return alone.scale_by(1.5)


def test_the_bound_knows_that_neighbours_slow_each_other_down() -> None:
    rates = {Share(pct): rate for pct, rate in ((50.0, 100.0), (100.0, 200.0))}
    table = {Workload(model, 1, share, 1): rate for model in ("a", "b") for share, rate in rates.items()}
    given = problem([demand(model, 90.0, 50.0) for model in ("a", "b")], options=BUDGET)
    placement, _ = solve_and_check(OPTIMAL, replace(given, estimator=SlowedEstimator(table)))
    assert len(placement.gpus) == placement.lower_bound_gpus == 2
    light, _ = solve_and_check(
        OPTIMAL,
        replace(
            given, demands=tuple(replace(d, rate_rps=60.0) for d in given.demands), estimator=SlowedEstimator(table)
        ),
    )
    assert len(light.gpus) == 1


def test_the_bound_by_queues_knows_that_neighbours_slow_parts_down() -> None:
    """Two halves serve 133/s beside each other, 200/s if they did not slow each other down, and a whole 120/s."""
    table = {Workload("m", 1, share, 1): rate for share, rate in ((Share(50.0), 100.0), (Share(), 120.0))}
    given = problem([demand("m", 1000.0, 300.0)])
    given = replace(given, queueing=BatchQueue(), estimator=SlowedEstimator(table))
    placement, _ = solve_and_check(OPTIMAL, given)
    assert bound_by_time(given).gpus == 8 <= len(placement.gpus)


def test_the_bound_by_queues_holds_for_parts_without_neighbours() -> None:
    table = {Workload("m", 1, share, 1): rate for share, rate in ((Share(80.0), 100.0), (Share(), 60.0))}
    given = problem([demand("m", 900.0, 300.0)])
    given = replace(given, queueing=BatchQueue(), estimator=SlowedEstimator(table))
    placement, _ = solve_and_check(OPTIMAL, given)
    assert bound_by_time(given).gpus <= len(placement.gpus) == 10


def test_a_part_without_neighbours_that_is_quicker_than_the_whole_does_not_break_the_bound() -> None:
    table = {Workload("a", 1, share, 1): rate for share, rate in ((Share(50.0), 100.0), (Share(), 60.0))}
    given = replace(problem([demand("a", 90.0, 50.0)], options=BUDGET), estimator=SlowedEstimator(table))
    placement, _ = solve_and_check(OPTIMAL, given)
    assert placement.lower_bound_gpus == 1


def test_a_demand_is_split_into_the_instances_that_leave_no_gap() -> None:
    # 7 × 100 in slices of one beats 4g (350) + 3g (250) + …
    table = TabledEstimator(
        {
            Workload("m", 1, Share(100.0, profile), 1): rate
            for profile, rate in (("1g.10gb", 100.0), ("3g.40gb", 250.0), ("4g.40gb", 350.0), ("7g.80gb", 600.0))
        }
    )
    given = problem([demand("m", 700.0, 40.0)], [(sliced_device(), None)], options=BUDGET)
    placement, _ = solve_and_check(OPTIMAL, replace(given, estimator=table))
    assert len(placement.gpus) == 1
    assert placement.lower_bound_gpus == 1


@pytest.mark.slow
def test_dear_and_cheap_devices_are_mixed_by_what_they_do_for_the_price() -> None:
    fleet = [(plain_device("plain", 1.0), 1), (plain_device("big", 3.0), None)]
    placement, _ = solve_and_check(OPTIMAL, problem([demand("m", 1100.0, 60.0)], fleet, options=BUDGET))
    assert sorted(gpu.device for gpu in placement.gpus) == ["big", "plain"]
    assert placement.lower_bound_cost_per_hour == pytest.approx(4.0)


def test_a_fixed_fleet_serves_as_much_as_can_be() -> None:
    # the whole device does 8 requests in 10 ms: 800 requests/s
    given = problem([demand("m", 5000.0)], [(plain_device(), 2)], options=BUDGET)
    placement, _ = solve_and_check(OPTIMAL, given)
    assert placement.rate_rps("m") == pytest.approx(1600.0)
    assert placement.lower_bound_gpus is None


def test_priorities_come_first() -> None:
    fleet = [(plain_device(), 1)]
    demands = [Demand("low", 700.0, Slo(100.0)), Demand("high", 700.0, Slo(100.0), priority=1)]
    placement, _ = solve_and_check(OPTIMAL, problem(demands, fleet, options=BUDGET))
    assert placement.rate_rps("high") == pytest.approx(700.0)


def test_below_its_floor_a_demand_gets_nothing() -> None:
    demands = [Demand("all", 1500.0, Slo(100.0), min_goodput_rps=1200.0), demand("some", 300.0)]
    placement, _ = solve_and_check(OPTIMAL, problem(demands, [(plain_device(), 1)], options=BUDGET))
    assert placement.rate_rps("all") == 0.0
    assert placement.rate_rps("some") == pytest.approx(300.0)


def test_few_replicas_allowed_cap_what_is_served() -> None:
    demands = [Demand("m", 3000.0, Slo(100.0), max_replicas=2)]
    placement, _ = solve_and_check(OPTIMAL, problem(demands, options=BUDGET))
    assert placement.rate_rps("m") == pytest.approx(1600.0)
    assert "max_replicas 2" in placement.unplaced[0].reason


def test_memory_that_shares_do_not_show_opens_another_device() -> None:
    given = problem([demand(f"m{i}", 5.0) for i in range(4)], estimator=LinearEstimator(memory_bytes=5 * 2**30))
    placement, _ = solve_and_check(OPTIMAL, given)
    assert len(placement.gpus) == placement.lower_bound_gpus == 2


def test_shares_too_many_to_list_are_still_packed_with_a_bound() -> None:
    fine = LinearEstimator(percents=tuple(2.5 * n for n in range(1, 41)))
    given = problem([demand(f"m{i}", 60.0 + i, 40.0) for i in range(12)], estimator=fine, options=BUDGET)
    placement, _ = solve_and_check(OPTIMAL, given)
    assert placement.unplaced == ()
    assert placement.lower_bound_gpus is not None
    assert placement.lower_bound_gpus <= len(placement.gpus) <= placement.lower_bound_gpus + 1


def test_a_time_limit_still_gives_a_sound_map() -> None:
    wanted = demands([(300.0, 50.0)] * 4)
    given = problem(wanted, options=replace(BUDGET, time_limit_s=1e-6))
    placement, _ = solve_and_check(OPTIMAL, given)
    assert placement.unplaced == ()
    best, _ = solve_and_check(OPTIMAL, problem(wanted, options=BUDGET))
    assert placement.lower_bound_gpus is not None
    assert 0 < placement.lower_bound_gpus <= len(best.gpus)


def test_what_still_runs_is_kept_when_rates_change() -> None:
    sure = LinearEstimator(interval=0.0)  # else another map may leave less in doubt, which comes first
    given = problem(demands([(300.0, 50.0), (250.0, 80.0), (120.0, 40.0)]), estimator=sure, options=BUDGET)
    _, before = solve_and_check(OPTIMAL, given)
    less = replace(given, demands=tuple(demands([(280.0, 50.0), (240.0, 80.0), (110.0, 40.0)])))
    fresh, _ = solve_and_check(OPTIMAL, less)
    kept, after = solve_and_check(OPTIMAL, replace(less, previous=before))
    assert cost(kept) == cost(fresh)
    assert after.predicted.moves == 0


@pytest.mark.slow
def test_what_has_no_room_any_more_is_planned_anew_with_few_devices_not_with_all() -> None:
    sure = LinearEstimator(interval=0.0)
    targets = [(250.0, 50.0), (160.0, 80.0), (350.0, 50.0), (190.0, 40.0), (140.0, 40.0), (350.0, 80.0)]
    given = problem(demands(targets), estimator=sure, options=BUDGET)
    _, before = solve_and_check(OPTIMAL, given)
    more = replace(given, demands=tuple(demands([(1.05 * rate, slo) for rate, slo in targets])))
    fresh, _ = solve_and_check(OPTIMAL, more)
    kept, after = solve_and_check(OPTIMAL, replace(more, previous=before))
    assert cost(kept) == cost(fresh)
    assert after.predicted.moves is not None
    assert after.predicted.moves < assign_devices(fresh.gpus, before).moves


def test_small_models_share_an_instance_beside_what_needs_one_of_its_own() -> None:
    # only instances are known: seven of 1g, and nine models that need a seventh of one each
    instances = LinearEstimator(percents=())
    given = problem([demand(f"m{i}", 2.0, 500.0) for i in range(9)], [(sliced_device(), None)], instances, BUDGET)
    placement, _ = solve_and_check(OPTIMAL, given)
    assert len(placement.gpus) == placement.lower_bound_gpus == 1
    mixed = [part for part in placement.gpus[0].partitions if len({replica.model for replica in part.replicas}) > 1]
    assert all(part.mig for part in placement.gpus[0].partitions)
    assert mixed


@pytest.mark.parametrize("budget", [None, 0.5])
def test_with_confidence_it_plans_as_if_the_upper_ends_were_the_means(budget: float | None) -> None:
    # the interval holds 90% and is half as wide as the value: its upper end is 1.5 times the mean
    wanted = demands([(300.0, 60.0), (90.0, 200.0)])
    careful = problem(
        wanted, estimator=LinearEstimator(interval=0.5), options=Options(confidence=0.9, latency_budget=budget)
    )
    slower = problem(
        wanted,
        estimator=LinearEstimator(start_ms=3.0, each_ms=1.5, interval=0.0),
        options=Options(latency_budget=budget),
    )
    ours, theirs = solve_and_check(OPTIMAL, careful)[0], solve_and_check(OPTIMAL, slower)[0]
    assert len(ours.gpus) == len(theirs.gpus)
    assert ours.lower_bound_gpus == theirs.lower_bound_gpus
    capacities = [
        [segment.capacity_rps for segment in Segments(given).best(wanted[0], plain_device())]
        for given in (careful, slower)
    ]
    assert capacities[0] == pytest.approx(capacities[1], rel=1e-6)


def _place(count: int, options: Options) -> Placement:
    estimator = LaunchBound(
        start_ms=0.5, each_ms=0.1, memory_bytes=700 * 2**20, percents=(10.0, 25.0, 50.0, 100.0), sizes=(1, 4, 16)
    )
    services = [demand(f"s{i}", 20.0, 50.0) for i in range(count)]
    placement, _ = solve_and_check(Optimal(), problem(services, estimator=estimator, options=options))
    assert placement.unplaced == ()
    return placement


@pytest.mark.parametrize(
    ("options", "counts"),
    [(Options(latency_budget=0.5), (1, 23, 24, 40, 41, 60, 82, 200)), (Options(time_limit_s=5.0), (20, 41, 60))],
    ids=["latency budget", "queues"],
)
def test_devices_grow_with_services_and_no_bound_exceeds_joined_maps(options: Options, counts: tuple[int, ...]) -> None:
    """Sixteen GiB hold 23 replicas of 700 MiB, and a fortieth of a device is share enough for each."""
    devices: dict[int, int] = {}
    for count in counts:
        placement = _place(count, options)
        devices[count] = len(placement.gpus)
        fewer = [(count_a, count - count_a) for count_a in devices if count - count_a in devices]
        joined = min((devices[count_a] + devices[count_b] for count_a, count_b in fewer), default=-(-count // 23))
        assert (placement.lower_bound_gpus or 0) <= min(joined, -(-count // 23))
        assert len(placement.gpus) <= joined
    assert list(devices.values()) == sorted(devices.values())


def _make_problem(rates: tuple[float, ...], slos_ms: tuple[float, ...]) -> Problem:
    estimator = LinearEstimator(start_ms=0.2, each_ms=0.15, percents=_PERCENTS, sizes=(1, 2, 4, 8), slowdown=0.15)
    demands = [demand(f"m{i}", rate, slo_ms) for i, (rate, slo_ms) in enumerate(zip(rates, slos_ms, strict=True))]
    given = problem(demands, estimator=estimator, options=Options(time_limit_s=10.0, isolate=True))
    strict = tuple(replace(item, slo=Slo(item.slo.latency_ms, 99.5)) for item in given.demands)
    return replace(given, demands=strict, queueing=BatchQueue())


def _fits_one_gpu(given: Problem) -> bool:
    """Whether some shares, in batches of two or four, keep every SLO on one GPU."""
    segments, device = Segments(given), given.fleet.entries[0].device
    for percents in itertools.product(_PERCENTS, repeat=len(given.demands)):
        if sum(percents) > 100.0:
            continue
        for batches in itertools.product((2, 4), repeat=len(percents)):
            shares = zip(given.demands, percents, batches, strict=True)
            replicas = tuple(PlacedReplica(d.model, b, 1, Share(pct), d.rate_rps) for d, pct, b in shares)
            partition = PlacedPartition(replicas)
            try:
                alone = all(
                    segments.meets(d, device, Workload(d.model, o.batch, o.share), d.rate_rps, partition.beside(o))
                    for d, o in zip(given.demands, replicas, strict=True)
                )
            except InputError:
                continue
            if alone:
                return True
    return False


@pytest.mark.parametrize(
    ("rates", "slos_ms"),
    [
        ((200.0, 200.0, 100.0), (9.0, 57.0, 30.0)),
        ((150.0, 60.0), (12.0, 40.0)),
        ((300.0, 100.0, 20.0), (20.0, 15.0, 60.0)),
    ],
)
def test_no_other_map_takes_fewer_devices(rates: tuple[float, ...], slos_ms: tuple[float, ...]) -> None:
    given = _make_problem(rates, slos_ms)
    placement, _ = solve_and_check(Optimal(), given)
    assert placement.unplaced == ()
    for policy in (FirstFitDecreasing(), Igniter()):
        other = policy.place(given)
        assert other.unplaced or len(placement.gpus) <= len(other.gpus)
    if _fits_one_gpu(given):
        assert len(placement.gpus) == 1


ONE_PROCESS = Options(latency_budget=0.5, max_processes=1)


@dataclass(frozen=True, slots=True)
class ListedOnly(LinearEstimator):
    """Times that were measured under the listed shares alone; others are extrapolated and up to twice as long."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time, with its source."""
        made = LinearEstimator.estimate(self, model, device, batch, share, beside, processes)
        if share in self.shares(model, device) and not beside:
            return made
        wide = replace(made.latency_ms, source=EXTRAPOLATED, high=2.0 * made.latency_ms.value)
        return replace(made, latency_ms=wide)


@dataclass(frozen=True, slots=True)
class SmallBatchesOnly(LinearEstimator):
    """Times that were measured in batches of up to 4; larger batches are extrapolated."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time, with its source."""
        estimate = LinearEstimator.estimate(self, model, device, batch, share, beside, processes)
        if batch <= 4:
            return estimate
        return replace(estimate, latency_ms=replace(estimate.latency_ms, source=EXTRAPOLATED))


def test_extrapolated_batches_under_a_measured_share_are_refused() -> None:
    measured = MeasuredOnly(SmallBatchesOnly(sizes=(1, 4, 8)))
    assert measured.estimate("m", plain_device(), 4, Share()).latency_ms.is_observed
    with pytest.raises(InputError, match="was not measured at batch 8"):
        measured.estimate("m", plain_device(), 8, Share())


def test_the_map_of_measured_instances_is_proven_and_no_replica_has_an_extrapolated_share() -> None:
    services = [demand(f"m{i}", 120.0, 60.0) for i in range(7)]
    given = problem(services, [(sliced_device(), None)], ListedOnly(percents=()), ONE_PROCESS)
    placement, _ = solve_and_check(Optimal(), given)
    assert placement.unplaced == () and not placement.stopped
    assert placement.lower_bound_gpus == len(placement.gpus)
    listed = set(given.estimator.shares("m0", sliced_device()))
    assert {replica.share for gpu in placement.gpus for replica in gpu.replicas()} <= listed


def test_extrapolated_shares_are_taken_where_they_save_a_device() -> None:
    services = [demand(f"m{i}", 5.0, 400.0) for i in range(4)]
    given = problem(services, estimator=ListedOnly(percents=(100.0,)), options=ONE_PROCESS)
    placement, _ = solve_and_check(Optimal(), given)
    assert len(placement.gpus) == 1


def test_only_a_problem_of_which_some_figures_were_measured_is_restricted() -> None:
    mixed = problem([demand()], [(sliced_device(), None)], ListedOnly(percents=()))
    restricted = restrict_to_measured(mixed)
    assert restricted is not None and isinstance(restricted.estimator, MeasuredOnly)
    device = sliced_device()
    whole = Share(100.0, "1g.10gb")
    assert restricted.estimator.estimate("m", device, 1, whole) == mixed.estimator.estimate("m", device, 1, whole)
    with pytest.raises(InputError):
        restricted.estimator.estimate("m", device, 1, Share(50.0, "1g.10gb"))
    for source in ("measured", EXTRAPOLATED):
        assert restrict_to_measured(problem([demand()], estimator=LinearEstimator(source=source))) is None


def test_a_first_map_divides_no_device_for_one_model_where_all_fit_on_an_undivided_one() -> None:
    # "m0" fits in an instance smaller than a share of 20%, the others in shares of 10%.
    estimator = LinearEstimator(percents=(10.0, 20.0, 50.0, 100.0))
    demands = [demand("m0", 1.0, 27.0), *(demand(f"m{number}", 1.0, 200.0) for number in range(1, 9))]
    options = Options(time_limit_s=1e-3, isolate=True)
    placement, _ = solve_and_check(OPTIMAL, problem(demands, [(sliced_device(), None)], estimator, options))
    assert len(placement.gpus) == 1


def test_a_single_cheapest_device_is_the_minimum_without_any_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plan_by_program", "bound_by_time", "share_workers"):
        monkeypatch.setattr(optimal, name, lambda *arguments, name=name: pytest.fail(f"{name} was needed"))
    placement, _ = solve_and_check(OPTIMAL, problem([demand("m0", 20.0), demand("m1", 20.0)]))
    assert (len(placement.gpus), placement.lower_bound_gpus, placement.stopped) == (1, 1, False)


@dataclass(frozen=True)
class CountingEstimator(LinearEstimator):
    asked: list[tuple[str, Share]] = field(default_factory=list, hash=False)

    def estimate(self, model: str, device: Device, batch: int, share: Share, *rest: Any) -> Estimate:
        self.asked.append((device.name, share))
        return super().estimate(model, device, batch, share, *rest)


def test_whether_anything_was_measured_is_told_by_the_whole_device() -> None:
    estimator = CountingEstimator(source="roofline")
    assert restrict_to_measured(problem([demand()], estimator=estimator)) is None
    assert estimator.asked == [("plain", Share())]


def test_undivided_partitions_need_no_estimates_of_their_parts() -> None:
    estimator = CountingEstimator(percents=(100.0,))
    given = problem([demand()], [(sliced_device(), None)], estimator=estimator)
    choices = CandidateSegments(given, Segments(given)).list_undivided()
    assert choices["m"] and {share.sm_pct for _, share in estimator.asked} == {100.0}


def test_workers_are_tried_on_no_device_as_dear_as_the_map() -> None:
    estimator = CountingEstimator()
    dear = replace(plain_device(), name="dear", price_per_hour=2.0)
    demands = [demand("a", 10.0, 200.0), demand("b", 20.0, 200.0)]
    given = problem(demands, [(plain_device(), None), (dear, None)], estimator)
    placed = [PlacedReplica(d.model, 1, 1, Share(), d.rate_rps, memory_bytes=2**30) for d in demands]
    apart = Placement("optimal", tuple(PlacedGpu("plain", (PlacedPartition((replica,)),)) for replica in placed))
    together = share_workers(given, apart, TimeBounds(1, 1.0, None), Limit(10.0))
    assert [gpu.device for gpu in together.gpus] == ["plain"]
    assert {device for device, _ in estimator.asked} == {"plain"}


def test_models_without_a_worker_are_not_explained_before_the_map_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    explains: list[bool] = []

    def share(given: Problem, placement: Placement, *limits: Any) -> Placement:
        explains.append(given.options.explains)
        return placement

    monkeypatch.setattr(optimal, "share_workers", share)
    OPTIMAL.place(problem([demand("m", 900.0), demand("n", 20.0)]))
    assert explains == [False]


def test_the_first_map_is_reported_before_the_program_of_undivided_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Placement] = []

    def plan(*arguments: Any) -> None:
        assert reported
        raise KeyboardInterrupt

    monkeypatch.setattr(optimal, "plan_by_program", plan)
    given = problem([demand("m", 900.0)], options=ONE_PROCESS)
    with pytest.raises(KeyboardInterrupt):
        OPTIMAL.place(replace(given, on_progress=reported.append))


def test_a_first_map_is_improved_before_the_program_of_all_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map of equal replicas takes five devices, and local search needs no program to drop one of them."""
    reported: list[Placement] = []

    def list_choices(offers: CandidateSegments) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CandidateSegments, "list_choices", list_choices)
    with pytest.raises(KeyboardInterrupt):
        OPTIMAL.place(replace(draw_queued(6), on_progress=reported.append))
    assert (len(reported[-1].gpus), reported[-1].found_by) == (4, "local search")


def test_a_rate_that_stays_short_is_raised_by_growing_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planned device always serves the same rate, so that the rate asked of the plan grows each time."""
    rates: list[float] = []

    def place(given: Problem, segments: Segments, demands: Sequence[Demand]) -> tuple[PlacedGpu, ...]:
        rates.append(demands[0].rate_rps)
        return (PlacedGpu("plain", (PlacedPartition((PlacedReplica("m", 8, 1, Share(), 1.0),)),)),)

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimal, "place_first_fit", place)
    monkeypatch.setattr(optimal, "plan_by_program", stop)
    with pytest.raises(KeyboardInterrupt):
        OPTIMAL.place(replace(problem([demand("m", 900.0)]), queueing=BatchQueue()))
    steps = [after / before for before, after in itertools.pairwise(rates)]
    assert len(steps) == optimal.MOST_REPLANS - 1 and all(a < b for a, b in itertools.pairwise(steps))


def test_extrapolated_shares_that_local_search_does_not_use_need_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    estimators: list[Estimator] = []
    list_all = CandidateSegments.list_choices

    def list_choices(offers: CandidateSegments) -> Choices:
        estimators.append(offers.problem.estimator)
        return list_all(offers)

    monkeypatch.setattr(CandidateSegments, "list_choices", list_choices)
    estimator = ListedOnly(percents=(50.0, 100.0))
    given = problem([demand(f"m{i}", 300.0, 60.0) for i in range(3)], estimator=estimator)
    placement, _ = solve_and_check(OPTIMAL, replace(given, queueing=BatchQueue()))
    assert len(placement.gpus) == 2 and estimators
    assert all(isinstance(estimator, MeasuredOnly) for estimator in estimators)


def test_no_program_is_solved_whose_relaxation_costs_as_much_as_a_known_map() -> None:
    given = problem([demand("a", 900.0, 60.0), demand("b", 900.0, 60.0)], options=ONE_PROCESS)
    segments = Segments(given)
    choices = CandidateSegments(given, segments).list_choices()
    plan = plan_by_program(given, choices, given.demands, Limit())
    cost = len(plan.pack(given, segments))
    assert plan.choice is not None and plan.bound == cost
    known = plan_by_program(given, choices, given.demands, Limit(), cost)
    assert (known.choice, known.bound) == (None, cost)
    assert plan_by_program(given, choices, given.demands, Limit(), cost + 1.0).choice == plan.choice


def test_replicas_of_a_demand_that_is_not_met_are_raised_to_what_they_serve_and_no_further() -> None:
    given = problem([demand("m", 500.0), demand("n", 40.0)], [(plain_device(), 1)], options=ONE_PROCESS)
    judge, half = Judge(given, Segments(given), Limit()), Share(50.0)
    replicas = tuple(PlacedReplica(model, 8, 1, half, 30.0) for model in ("m", "n"))
    missing = tuple(Unplaced(model=model, rate_rps=rate, reason="full") for model, rate in (("m", 470.0), ("n", 10.0)))
    before = Placement("optimal", (PlacedGpu("plain", (PlacedPartition(replicas),)),), missing)
    (gpu,) = judge.raise_rates(before).gpus
    rates = {replica.model: replica.rate_rps for replica in gpu.replicas()}
    assert rates == {"m": pytest.approx(400.0), "n": pytest.approx(40.0)}  # 8 requests in 20 ms


def test_no_bound_counts_late_batches_or_more_requests_of_a_batch_than_arrive_in_time_for_it() -> None:
    # A batch of 32 would serve 889/s, but is late; requests in time arrive within 3.5 ms of a batch: 3.1 on average.
    estimator = LinearEstimator(start_ms=20.0, each_ms=0.5, sizes=(1, 32), percents=(100.0,), interval=0.0)
    given = replace(problem([demand("m", 600.0, 24.0)], estimator=estimator), queueing=BatchQueue())
    bound = bound_by_time(given).gpus
    placement, _ = solve_and_check(OPTIMAL, given)
    assert 4 <= bound <= len(placement.gpus)


LAPTOP = replace(plain_device(), name="cpu-test", kind="cpu", compute_units=2)


class TwoCores(LinearEstimator):
    """Knows shares of one core and of both."""

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return Share(50.0), Share(100.0)


def make_problem(count: int | None, rates: tuple[float, ...], slo_ms: float = 200.0, **options: bool) -> Problem:
    demands = [demand(f"m{number}", rate_rps, slo_ms) for number, rate_rps in enumerate(rates)]
    given = problem(demands, estimator=TwoCores(), options=Options(**options))  # type: ignore[arg-type]
    return replace(given, fleet=Fleet((FleetEntry(LAPTOP, count),)))


def solve(given: Problem) -> Placement:
    return solve_and_check(Optimal(), given)[0]


@pytest.mark.parametrize("count", [1, None])
@pytest.mark.parametrize("models", [3, 4, 8])
def test_light_models_take_turns_on_two_cores(count: int | None, models: int) -> None:
    placement = solve(make_problem(count, (5.0,) * models))
    assert not placement.unplaced and len(placement.gpus) == 1
    assert placement.lower_bound_gpus == 1
    assert len({replica.model for replica in placement.gpus[0].replicas()}) == models


def test_the_busiest_model_keeps_a_share_of_its_own_where_the_others_fit_beside() -> None:
    placement = solve(make_problem(1, (150.0, 5.0, 5.0, 5.0)))
    assert not placement.unplaced
    turning = {replica.model for replica in placement.gpus[0].replicas() if replica.turns}
    assert turning == {"m1", "m2", "m3"}


def test_two_models_with_a_core_each_do_not_take_turns() -> None:
    placement = solve(make_problem(1, (5.0, 5.0)))
    assert not any(replica.turns for replica in placement.gpus[0].replicas())


def test_isolated_models_have_shares_of_their_own() -> None:
    placement = solve(make_problem(None, (5.0,) * 4, isolate=True))
    assert len(placement.gpus) == 2
    assert not any(replica.turns for gpu in placement.gpus for replica in gpu.replicas())


def test_work_bounds_the_devices_and_no_bound_is_above_the_plan() -> None:
    rates = (300.0, 300.0, 300.0, 20.0)
    placement = solve(make_problem(None, rates))
    assert not placement.unplaced
    assert placement.lower_bound_gpus is not None
    assert 1 < placement.lower_bound_gpus <= len(placement.gpus)


def test_an_slo_that_waiting_would_break_is_left_unserved_on_one_machine() -> None:
    placement = solve(make_problem(1, (5.0,) * 6, slo_ms=3.3))
    assert placement.unplaced and any(replica.turns for replica in placement.gpus[0].replicas())
    assert placement.upper_bound_goodput_rps is not None
    assert placement.upper_bound_goodput_rps >= sum(placement.rates_rps().values())


def test_workers_of_a_fixed_fleet_serve_parts_of_demands_that_do_not_fit_whole() -> None:
    placement = solve(make_problem(1, (300.0, 300.0, 300.0), slo_ms=100.0))
    assert placement.unplaced and min(placement.rate_rps(f"m{number}") for number in range(3)) > 0.0


class ShortLimit(Limit):
    """Is over after some questions."""

    questions: ClassVar[Iterator[int]]

    @property
    def is_over(self) -> bool:
        return next(self.questions, None) is None

    def keeping(self, seconds: float) -> Limit:
        return self


def test_a_search_of_contents_that_is_cut_short_uses_the_contents_found_so_far() -> None:
    ShortLimit.questions = iter(range(20))
    estimator = LinearEstimator(slowdown=0.1, percents=tuple(5.0 * n for n in range(1, 21)))
    fleet = [(plain_device(), 1)]
    given = problem([demand("a", 900.0, 60.0), demand("b", 900.0, 80.0)], fleet, estimator, ONE_PROCESS)
    segments = SharedSegments(given)
    choices = CandidateSegments(given, segments).list_choices()
    gpus = Contents(given, segments, choices, ShortLimit()).place(given.demands, (), is_partial=True)
    assert sum(replica.rate_rps for gpu in gpus for replica in gpu.replicas()) > 400.0


class OneSlowModel(TwoCores):
    """No share serves the model "slow" in time."""

    def estimate(self, model: str, *arguments: Any, **named: Any) -> Estimate:
        estimate = super().estimate(model, *arguments, **named)
        return replace(estimate, latency_ms=Figure(1e3, MEASURED)) if model == "slow" else estimate


@pytest.mark.parametrize(("questions", "models"), [(300, 30), (600, 40)])
def test_workers_filled_until_the_time_is_up_are_used_and_pass_over_a_model_that_fits_nowhere(
    questions: int, models: int
) -> None:
    ShortLimit.questions = iter(range(questions))
    demands = [demand(model, 5.0, 200.0) for model in ("m0", "m1", "slow", *(f"m{n}" for n in range(2, 40)))]
    given = problem(demands, estimator=OneSlowModel(memory_bytes=2**20))
    given = replace(given, fleet=Fleet((FleetEntry(LAPTOP, 1),)))
    nothing = Placement("optimal", (), tuple(Unplaced(model=d.model, rate_rps=5.0, reason="") for d in demands))
    shared = share_workers(given, nothing, TimeBounds(1, 1.0, None), ShortLimit(1.0))
    assert len(shared.rates_rps()) >= models


@pytest.mark.parametrize(("start_ms", "percents"), [(2.0, (25.0, 50.0, 100.0)), (0.5, (50.0, 100.0))])
def test_a_device_too_small_for_a_demand_serves_no_less_than_full_of_equal_replicas(
    start_ms: float, percents: tuple[float, ...]
) -> None:
    estimator = LinearEstimator(start_ms=start_ms, percents=percents, sizes=(1, 2, 4))
    given = problem([demand("m", 3_000.0, 4.0)], [(plain_device(), 1)], estimator)
    given = replace(given, queueing=BatchQueue())
    pools, rates_rps = Pools(given, Segments(given)), []
    for percent, batch in itertools.product(percents, (1, 2, 4)):
        replica = PlacedReplica("m", batch, 1, Share(percent), 1.0)
        full = PlacedGpu("plain", (PlacedPartition((replica,) * int(100.0 / percent)),))
        rates_rps.append(pools.served_rps((full,))["m"])
    placement, _ = solve_and_check(OPTIMAL, given)
    assert placement.rate_rps("m") >= 0.99 * max(rates_rps) > 0.0


class Contexts(LinearEstimator):
    """A process holds 1 GiB, of which 900 MiB are its context."""

    def estimate(self, *arguments: Any, **named: Any) -> Estimate:
        memory = Figure(float(2**30), MEASURED)
        return replace(super().estimate(*arguments, **named), memory_bytes=memory, context_bytes=900 * 2**20)


def plan_alike(count: int, **options: bool) -> tuple[Placement, DeploymentMap]:
    demands = [demand(f"m{number}", 4.0, 400.0) for number in range(count)]
    given = problem(demands, estimator=Contexts(), options=Options(**options))  # type: ignore[arg-type]
    gpu = replace(plain_device(), dram_bytes=6 * 2**30)
    return solve_and_check(Optimal(), replace(given, fleet=Fleet((FleetEntry(gpu, None),))))


def test_workers_hold_one_context_and_devices_grow_with_the_models_of_small_memory() -> None:
    counts = []
    for count in (1, 6, 7, 20, 41):
        placement, deployment = plan_alike(count)
        assert not placement.unplaced
        assert placement.lower_bound_gpus is not None and placement.lower_bound_gpus <= len(placement.gpus)
        counts.append(len(placement.gpus))
        for node in deployment.nodes:
            for gpu in node.gpus:
                assert sum(r.predicted.memory_bytes or 0 for r in gpu.partitions[0].replicas) <= 6 * 2**30
    assert counts == sorted(counts) and counts[-1] == 1
    assert len(plan_alike(7, isolate=True)[0].gpus) == 2  # six processes fit a device


def test_the_check_refuses_a_worker_whose_queue_or_memory_is_too_long() -> None:
    _, deployment = plan_alike(12)
    (node,) = deployment.nodes
    (gpu,) = node.gpus
    (partition,) = gpu.partitions
    assert {replica.turns for replica in partition.replicas} >= {1}
    given = problem(
        [demand(f"m{number}", 4.0, 400.0) for number in range(12)],
        [(replace(plain_device(), dram_bytes=6 * 2**30), None)],
        Contexts(),
    )

    def check_changed(**update: object) -> str:
        replicas = tuple(replica.model_copy(update=update) for replica in partition.replicas)
        changed = gpu.model_copy(update={"partitions": (partition.model_copy(update={"replicas": replicas}),)})
        models = {name: model.model_copy(update={"rate_rps": 1e6}) for name, model in deployment.models.items()}
        nodes = (node.model_copy(update={"gpus": (changed,)}),)
        broken = deployment.model_copy(update={"nodes": nodes, "models": models})
        return " ".join(map(str, check(broken, collect_evidence(given))))

    assert "serves at most" in check_changed(rate_rps=40.0)
    assert "GiB" in check_changed(turns=0, sm_share_pct=5.0)


def test_isolated_demands_without_mps_take_a_whole_number_of_devices_each() -> None:
    """Three demands keep a device busy for less than a tenth of the time, the fourth 2.5 devices."""
    given = problem(demands([(20.0, 100.0)] * 3 + [(2000.0, 100.0)]), options=Options(isolate=True, no_mps=True))
    given = replace(given, queueing=BatchQueue(), estimator=name_services(LinearEstimator(), {}, no_mps=True))
    placement, _ = solve_and_check(OPTIMAL, given)
    assert bound_by_time(given).gpus == placement.lower_bound_gpus == len(placement.gpus) == 6
    assert bound_by_time(replace(given, options=Options(no_mps=True))).gpus == 3


@pytest.mark.parametrize("count", [1, 2])
def test_no_isolated_demand_is_served_beyond_the_bound_of_a_small_fleet(count: int) -> None:
    """A demand for 2.5 devices takes three, and of fewer it has all the time."""
    given = problem([demand("a", 2000.0, 100.0)], [(plain_device(), count)], options=Options(isolate=True, no_mps=True))
    given = replace(given, queueing=BatchQueue(), estimator=name_services(LinearEstimator(), {}, no_mps=True))
    placement, _ = solve_and_check(OPTIMAL, given)
    bound_rps = bound_by_time(given).goodput_rps
    assert bound_rps is not None
    assert 2000.0 - sum(unplaced.rate_rps for unplaced in placement.unplaced) <= bound_rps * (1.0 + 1e-6)


@pytest.mark.parametrize(("option", "turns", "text"), [("isolate", 1, "take turns"), ("no_mps", 0, "2 processes run")])
def test_the_check_refuses_partitions_that_the_options_of_the_plan_exclude(option: str, turns: int, text: str) -> None:
    given = problem([demand("a", 20.0, 100.0), demand("b", 20.0, 100.0)], options=Options(max_batch=1))
    share = Share(100.0 if turns else 50.0)
    replicas = tuple(PlacedReplica(model, 1, 1, share, 20.0, memory_bytes=2**30, turns=turns) for model in "ab")
    deployment = to_map(given, Placement("", (PlacedGpu("plain", (PlacedPartition(replicas),)),)))
    assert not check(deployment, collect_evidence(given))
    settings = deployment.planned_with.model_copy(update={option: True})
    (violation,) = check(deployment.model_copy(update={"planned_with": settings}), collect_evidence(given))
    assert text in str(violation)
