"""Algorithm 2 of USHER (OSDI'24 §3.3.2), step by step on requirements worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, Figure, Workload
from gpuprof.domain.fleet import FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, solve_and_check
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.requirement import Requirement
from gpuprof.placement.published.usher import FreeCapacity, OpenedDevices, Option, Trial, Usher, order_models
from gpuprof.placement.segment import Segment

CHEAP, DEAR = FleetEntry(plain_device("cheap", 1.0), None), FleetEntry(plain_device("dear", 3.0), None)


def requirement(creq: float, mreq: float, goodput_rps: float = 100.0, device: str = "cheap") -> Requirement:
    segment = Segment("m", device, Share(creq), 4, 1, goodput_rps, creq / 100.0, 0, 10.0)
    return Requirement(segment, creq, mreq)


def option(model: str, creq: float, mreq: float, replicas: int = 1, device: str = "cheap") -> Option:
    requirements = {device: requirement(creq, mreq, device=device)}
    return Option(Demand(model, 100.0, Slo(100.0)), 4, replicas, requirements)


def names(options: list[Option]) -> list[str]:
    return [option.demand.model for option in options]


MIXED = [
    option("c-small", 20.0, 10.0),
    option("m-large", 30.0, 60.0),
    option("neutral", 44.0, 40.0),
    option("c-large", 60.0, 30.0),
    option("m-small", 10.0, 20.0),
    option("c-mid", 40.0, 20.0),
]


def test_compute_and_memory_heavy_models_take_turns_each_by_falling_need_and_neutral_ones_come_last() -> None:
    assert names(order_models(MIXED)) == ["c-large", "m-large", "c-mid", "m-small", "c-small", "neutral"]


@pytest.mark.parametrize(
    ("creq", "mreq", "leaning"), [(12.0, 10.0, "compute"), (10.0, 12.0, "memory"), (11.9, 10.0, ""), (10.0, 11.9, "")]
)
def test_a_model_is_heavy_from_a_ratio_of_1_2(creq: float, mreq: float, leaning: str) -> None:
    assert option("m", creq, mreq).leaning == leaning


def test_without_classes_only_the_need_counts_and_without_sorting_the_order_given() -> None:
    assert names(order_models(MIXED, "CM")) == ["m-large", "c-large", "neutral", "c-mid", "c-small", "m-small"]
    assert names(order_models(MIXED, "S")) == names(MIXED)


def test_the_groups_own_devices_come_before_those_of_others_and_these_before_new_ones() -> None:
    trial = Trial(OpenedDevices([CHEAP], [FreeCapacity("cheap", 45.0, 45.0)]))
    trial.place(option("first", 50.0, 50.0))  # does not fit the other group's device
    trial.place(option("second", 40.0, 40.0))  # the group's own, although the other would be fuller
    trial.place(option("third", 40.0, 40.0))  # only the other group's has room
    assert [(host.demand.model, index) for host, index in trial.hosts] == [("first", 1), ("second", 1), ("third", 0)]
    assert trial.cost == 1.0


def test_the_device_that_is_left_with_least_room_is_chosen() -> None:
    ground = OpenedDevices(
        [CHEAP],
        [FreeCapacity("cheap", 90.0, 90.0), FreeCapacity("cheap", 30.0, 35.0), FreeCapacity("cheap", 60.0, 20.0)],
    )
    trial = Trial(ground)
    trial.place(option("m", 25.0, 20.0))
    assert [index for _, index in trial.hosts] == [1]  # leaves 5 + 15, the third would be left with 35 + 0


def test_replicas_of_a_model_stand_on_different_devices() -> None:
    trial = Trial(OpenedDevices([CHEAP], [FreeCapacity("cheap")]))
    trial.place(option("m", 10.0, 10.0, replicas=3))
    assert [index for _, index in trial.hosts] == [0, 1, 2]
    assert trial.cost == 2.0


def test_the_cheapest_kind_that_can_host_the_model_is_opened() -> None:
    entries = [CHEAP, DEAR]
    trial = Trial(OpenedDevices(entries, []))
    trial.place(option("anywhere", 50.0, 50.0))
    trial.place(option("large", 90.0, 90.0, device="dear"))
    assert [space.device for space in trial.spaces()] == ["cheap", "dear"]
    assert trial.cost == 4.0


def test_a_fixed_fleet_goes_on_to_the_next_kind_and_serves_less_when_all_are_used() -> None:
    entries = [FleetEntry(CHEAP.device, 1), FleetEntry(DEAR.device, 1)]
    both = {"cheap": requirement(80.0, 10.0, 30.0), "dear": requirement(80.0, 10.0, 40.0, "dear")}
    candidate = Option(Demand("m", 100.0, Slo(100.0)), 4, 3, both)
    trial = Trial(OpenedDevices(entries, []))
    trial.place(candidate)
    assert [space.device for space in trial.spaces()] == ["cheap", "dear"]
    assert trial.goodput_rps == 70.0


@dataclass(frozen=True)
class Needs(LinearEstimator):
    """Compute (at batch 1) and memory by model, and times that do not depend on the share."""

    creq: tuple[tuple[str, float], ...] = ()
    gib: tuple[tuple[str, float], ...] = ()

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        compute, memory = dict(self.creq)[model], dict(self.gib)[model]
        return Estimate(
            Workload(model, batch, share, processes),
            device.name,
            Figure((2.0 + batch) * (1.0 + self.slowdown * len(beside)), MEASURED),
            memory_bytes=Figure(memory * 2**30, MEASURED),
            creq_pct=(("max_occupancy", Figure(compute, MEASURED)),),
        )


def together(placement: Placement) -> list[list[str]]:
    return sorted(sorted(replica.model for replica in gpu.replicas()) for gpu in placement.gpus)


def test_compute_heavy_models_share_devices_with_memory_heavy_ones() -> None:
    # 16 GiB a device: two of a kind exceed a device in one resource, one of each fills it in both
    needs = Needs(
        creq=(("c1", 70.0), ("c2", 70.0), ("m1", 25.0), ("m2", 25.0)),
        gib=(("c1", 4.0), ("c2", 4.0), ("m1", 11.0), ("m2", 11.0)),
    )
    demands = [demand(name, 10.0) for name in ("c1", "c2", "m1", "m2")]
    placement, _ = solve_and_check(Usher(), problem(demands, estimator=needs, options=Options(latency_budget=0.5)))
    assert together(placement) == [["c1", "m1"], ["c2", "m2"]]


def test_up_to_six_times_the_least_replicas_are_tried_unless_division_is_switched_off() -> None:
    # 250 requests/s of at most 100 a replica: three at least; the caps are those of the fleet and of the demand
    requirements = {4: {"plain": requirement(40.0, 10.0, 100.0)}}
    limited = demand("m", 250.0)
    elastic, fixed = problem([limited]), problem([limited], [(plain_device(), 10)])

    def degrees(policy: Usher, given: Problem, wanted: Demand) -> list[int]:
        return [option.replicas for option in policy._options(given, wanted, requirements)]

    assert degrees(Usher(), elastic, limited) == [3, 6, 9, 12, 15, 18]
    assert degrees(Usher(without="WD"), elastic, limited) == [3]
    assert degrees(Usher(), fixed, limited) == [3, 6, 9]
    assert degrees(Usher(), elastic, replace(limited, max_replicas=7)) == [3, 6]


def test_a_replica_that_would_break_an_slo_gets_a_device_of_its_own_where_there_is_one() -> None:
    needs = Needs(slowdown=1.0, creq=(("a", 40.0), ("b", 40.0)), gib=(("a", 1.0), ("b", 1.0)), sizes=(1,))
    demands = [demand("a", 10.0, 10.0), demand("b", 10.0, 10.0)]  # 3 ms alone, 6 beside the other, 5 are allowed
    elastic = problem(demands, estimator=needs, options=Options(latency_budget=0.5))
    placement, _ = solve_and_check(Usher(), elastic)
    assert together(placement) == [["a"], ["b"]]
    assert placement.unplaced == ()
    fixed = problem(demands, [(plain_device(), 1)], needs, Options(latency_budget=0.5))
    placement, _ = solve_and_check(Usher(), fixed)
    assert [shortfall.model for shortfall in placement.unplaced] == ["b"]
    assert "beside a it would not keep its SLO" in placement.unplaced[0].reason


def test_a_replica_that_would_break_an_slo_goes_to_another_kind_where_its_own_is_used_up() -> None:
    needs = Needs(slowdown=1.0, creq=(("a", 40.0), ("b", 40.0)), gib=(("a", 1.0), ("b", 1.0)), sizes=(1,))
    demands = [demand("a", 10.0, 10.0), demand("b", 10.0, 10.0)]
    fleet = [(plain_device(), 1), (plain_device("other", 2.0), 1)]
    placement, _ = solve_and_check(Usher(), problem(demands, fleet, needs, Options(latency_budget=0.5)))
    assert {gpu.device: [replica.model for replica in gpu.replicas()] for gpu in placement.gpus} == {
        "plain": ["a"],
        "other": ["b"],
    }


def test_heterogeneous_devices_are_bought_by_their_price() -> None:
    needs = Needs(creq=(("small", 10.0), ("big", 30.0)), gib=(("small", 3.0), ("big", 20.0)))
    large = replace(plain_device("large", 5.0), dram_bytes=40 * 2**30)
    given = problem(
        [demand("small", 10.0), demand("big", 10.0)],
        [(large, None), (plain_device("little", 1.0), None)],
        needs,
        Options(latency_budget=0.5),
    )
    placement, deployment = solve_and_check(Usher(), given)
    # both are memory-heavy; big comes first and fits the large one only, beside which small costs nothing more
    assert together(placement) == [["big", "small"]]
    assert deployment.predicted.cost_per_hour == 5.0
    alone = replace(given, demands=(demand("small", 10.0),))
    assert [gpu.device for gpu in Usher().place(alone).gpus] == ["little"]


def test_a_fixed_fleet_serves_as_much_as_it_can() -> None:
    needs = Needs(creq=(("a", 60.0), ("b", 60.0)), gib=(("a", 1.0), ("b", 1.0)), sizes=(4,))
    # one replica serves 4 / 6 ms = 667 requests/s
    given = problem([demand("a", 600.0), demand("b", 600.0)], [(plain_device(), 1)], needs, Options(latency_budget=1.0))
    placement, _ = solve_and_check(Usher(), given)
    assert sum(placement.rates_rps().values()) == pytest.approx(600.0)
    assert len(placement.unplaced) == 1
