from dataclasses import replace

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, sliced_device, solve_and_check
from gpuprof.placement.deploy import to_map
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.parvagpu import ParvaGpu
from tests.placement.table import TabledEstimator

#: InceptionV3 on an A100-80 as ParvaGPU §III-B prints it: batch 4 on one slice with 1, 2, 3 processes takes 11, 18 and
#: 27 ms for 354, 444 and 446 requests/s, batch 8 on four slices 10, 9 and 13 ms for 786, 1695 and 1810.
INCEPTION = {
    Workload("inceptionv3", batch, Share(100.0, profile), processes): rate
    for profile, batch, rates in (("1g.10gb", 4, (354, 444, 446)), ("4g.40gb", 8, (786, 1695, 1810)))
    for processes, rate in enumerate(rates, 1)
}


def inception(rate_rps: float, slo_ms: float, count: int | None = None) -> Problem:
    given = problem([demand("inceptionv3", rate_rps, slo_ms)], [(sliced_device(), count)])
    return replace(given, estimator=TabledEstimator(INCEPTION), options=Options(latency_budget=0.5))


def segments(placement: Placement) -> list[tuple[str | None, int | None, int]]:
    return [(p.mig, p.start, p.replicas[0].processes) for gpu in placement.gpus for p in gpu.partitions]


def test_the_triplet_of_most_throughput_within_half_the_slo_is_taken() -> None:
    # half of 60 ms allows three processes on one slice, half of 50 ms only two, half of 30 ms only one
    for slo_ms, processes in ((60.0, 3), (50.0, 2), (30.0, 1)):
        placement, _ = solve_and_check(ParvaGpu(), inception(300.0, slo_ms))
        assert segments(placement) == [("1g.10gb", 0, processes)]


def test_demand_matching_takes_the_efficient_size_and_the_smallest_for_the_rest() -> None:
    # 1810/4 = 452.5 requests/s for each slice beat 446/1; 1810 + 1810 + 380
    placement, _ = solve_and_check(ParvaGpu(unoptimized=True), inception(4000.0, 60.0))
    assert segments(placement) == [("4g.40gb", 0, 3), ("1g.10gb", 4, 3), ("4g.40gb", 0, 3)]


def test_fragmented_gpus_are_broken_up_into_the_gaps_before_them() -> None:
    # of five GPUs with four slices each, the fifth needs five segments of one slice and leaves a surplus, with which
    # the fourth needs four: nine in the gaps of the other three
    unoptimized, _ = solve_and_check(ParvaGpu(unoptimized=True), inception(5 * 1810.0, 60.0))
    optimized, _ = solve_and_check(ParvaGpu(), inception(5 * 1810.0, 60.0))
    assert (len(unoptimized.gpus), len(optimized.gpus)) == (5, 3)


def test_single_runs_one_process() -> None:
    placement, _ = solve_and_check(ParvaGpu(single=True), inception(300.0, 60.0))
    assert segments(placement) == [("1g.10gb", 0, 1)]
    assert placement.policy == "parvagpu-single"


def test_three_slices_stand_in_the_upper_half_so_that_four_fit_below() -> None:
    table = {Workload(m, 1, Share(100.0, p), 1): 100.0 for m, p in (("three", "3g.40gb"), ("four", "4g.40gb"))}
    given = problem([demand("three", 90.0), demand("four", 90.0)], [(sliced_device(), None)])
    given = replace(given, estimator=TabledEstimator(table), options=Options(latency_budget=0.5))
    placement, _ = solve_and_check(ParvaGpu(), given)
    assert segments(placement) == [("4g.40gb", 0, 1), ("3g.40gb", 4, 1)]


def test_a_fixed_fleet_serves_what_it_can_and_names_the_rest() -> None:
    placement, _ = solve_and_check(ParvaGpu(), inception(10 * 1810.0, 60.0, count=2))
    assert len(placement.gpus) == 2
    # one of the two was broken up into five segments of one slice, which serve more
    assert placement.rate_rps("inceptionv3") == pytest.approx(1810.0 + 5 * 446.0)
    assert placement.unplaced[0].rate_rps == pytest.approx(18100.0 - 4040.0)


def test_devices_without_mig_are_refused() -> None:
    with pytest.raises(InputError, match="parvagpu needs a device with MIG but the fleet has plain"):
        ParvaGpu().place(problem([demand("m")], [(plain_device(), None)]))


SERVICES = [demand(f"s{i}", 60.0 + 90.0 * i, 40.0 + 15.0 * i) for i in range(8)]


def stood(placement: Placement, without: str = "") -> list[tuple[tuple[str, str | None, int | None, int, int], ...]]:
    """Return for each GPU what stands where on it, besides the service ``without``."""
    layouts = []
    for gpu in placement.gpus:
        parts = [(p.replicas[0], p.mig, p.start) for p in gpu.partitions]
        layouts.append(tuple((r.model, mig, at, r.batch, r.processes) for r, mig, at in parts if r.model != without))
    return [layout for layout in layouts if layout]


def planned_from(demands: list[Demand], count: int | None = None) -> Problem:
    now = problem(SERVICES, [(sliced_device(), None)], options=Options(latency_budget=0.5))
    running = to_map(now, ParvaGpu().place(now))
    changed = problem(demands, [(sliced_device(), count)], options=Options(latency_budget=0.5))
    return replace(changed, previous=running)


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("slo_factor", [0.7, 1.0, 1.5])
def test_only_the_service_whose_slo_or_rate_changed_is_reconfigured(index: int, slo_factor: float) -> None:
    # ParvaGPU §III-F
    old = SERVICES[index]
    new = replace(old, slo=Slo(old.slo.latency_ms * slo_factor), rate_rps=old.rate_rps * 1.3)
    given = planned_from([new if demand is old else demand for demand in SERVICES])
    before = ParvaGpu().place(replace(given, demands=tuple(SERVICES), previous=None))
    after, _ = solve_and_check(ParvaGpu(), given)
    assert after.unplaced == ()
    assert stood(after, old.model) == stood(before, old.model)
    assert sum(after.rates_rps().values()) == pytest.approx(sum(demand.rate_rps for demand in given.demands))


def test_a_service_that_is_gone_frees_its_segments_and_a_new_one_takes_them() -> None:
    given = planned_from([*SERVICES[1:], demand("new", 60.0, 40.0)])
    after, _ = solve_and_check(ParvaGpu(), given)
    before = ParvaGpu().place(replace(given, demands=tuple(SERVICES), previous=None))
    assert stood(after, "new") == stood(before, "s0")
    assert len(after.gpus) == len(before.gpus)


def test_nothing_is_kept_of_a_map_that_does_not_fit_the_fleet_any_more() -> None:
    after, _ = solve_and_check(ParvaGpu(), planned_from(SERVICES, count=1))
    assert len(after.gpus) == 1
    assert after.unplaced


def test_a_service_whose_profile_changed_is_configured_anew() -> None:
    given = planned_from(SERVICES)
    slower = replace(given, estimator=LinearEstimator(each_ms=1.6))
    after, _ = solve_and_check(
        ParvaGpu(), slower
    )  # sound by the new times, although the map was planned by the old ones
    assert after.unplaced == ()


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        (ParvaGpu(single=True, processes=2), Options(), "processes=2 has no effect beside single"),
        (ParvaGpu(processes=2), Options(max_processes=3), "processes=2 has no effect beside a limit of 3"),
        (ParvaGpu(processes=0), Options(), "processes must be at least 1 but got 0"),
    ],
)
def test_processes_that_would_have_no_effect_are_refused(policy: ParvaGpu, options: Options, said: str) -> None:
    with pytest.raises(InputError, match=said):
        policy.place(problem([demand("m")], [(sliced_device(), None)], options=options))
