"""Rescheduling in the loop."""

from collections.abc import Mapping

import numpy as np
import pytest

from gpuprof.domain.arrival_process import ArrivalProcess, DeterministicArrivals, GammaArrivals, RecordedArrivals
from gpuprof.domain.deployment import DeploymentMap, MigInstance
from gpuprof.simulator.cluster import SimulationOptions, Switch, places_of
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.reschedule import MoveCosts, Timetable, make_timetable, observed_rates, summarize_autoscaling
from tests.simulator.maps import make_map, replica

ONE = make_map([[replica("m", [10.0])]], slo_ms=100.0)
TWO = make_map([[replica("m", [10.0])], [replica("m", [10.0])]], slo_ms=100.0)


def rising() -> dict[str, ArrivalProcess]:
    """50 requests/s for 20 s, then 150."""
    times = np.concatenate([np.arange(0, 20e9, 20e6), np.arange(20e9, 60e9, 1e9 / 150)])
    return {"m": RecordedArrivals(times.astype(np.int64), 60.0)}


def by_load(rates: Mapping[str, float]) -> DeploymentMap:
    return TWO if rates["m"] > 90.0 else ONE


def follow_load() -> Timetable:
    rates = observed_rates(ONE, rising(), SimulationOptions(60.0), 10.0)
    return make_timetable(ONE, rates, 10.0, by_load, MoveCosts(4.0, 9.0), 60.0)


def run(table: Timetable, arrivals: Mapping[str, ArrivalProcess]) -> list[int]:
    options = SimulationOptions(60.0, switches=table.switches, absent=table.absent)
    return [r.answered for r in simulate(table.deployment, arrivals, options).replicas]


def test_the_rates_that_are_observed_are_those_that_are_simulated() -> None:
    arrivals: dict[str, ArrivalProcess] = {"m": GammaArrivals(70.0, 2.0)}
    rates = observed_rates(ONE, arrivals, SimulationOptions(30.0, seed=3), 10.0)
    result = simulate(ONE, arrivals, SimulationOptions(30.0, seed=3)).models[0]
    assert sum(10.0 * rate["m"] for rate in rates) == pytest.approx(result.requests)
    assert len(rates) == 3


def test_a_new_replica_begins_when_its_model_is_loaded_and_the_one_that_stays_goes_on() -> None:
    table = follow_load()
    assert [(epoch.begin_s, epoch.started) for epoch in table.epochs] == [(0.0, 0), (30.0, 1)]
    assert table.switches == (Switch(34.0, begin=(1,)),)
    assert table.absent == (1,)
    assert [(epoch.gpus, epoch.end_s) for epoch in table.epochs] == [(1, 30.0), (2, 60.0)]


def test_more_replicas_answer_more_in_time_than_the_map_that_stays() -> None:
    table = follow_load()
    assert sum(run(table, rising())) > 1.2 * sum(run(Timetable(ONE, table.epochs[:1], (), ()), rising()))


def test_a_replica_that_ends_finishes_what_it_has() -> None:
    options = SimulationOptions(1.0, switches=(Switch(0.012, begin=(1,), end=(0,)),), absent=(1,))
    arrivals: dict[str, ArrivalProcess] = {"m": RecordedArrivals(np.array([0, 1, 20]) * 1_000_000, 1.0)}
    result = simulate(TWO, arrivals, options)
    assert [r.answered for r in result.replicas] == [2, 1]
    assert sum(result.models[0].missed.values()) == 0


def test_what_is_replaced_goes_on_until_its_successor_is_loaded() -> None:
    faster = make_map([[replica("m", [5.0])]], slo_ms=100.0)
    table = make_timetable(ONE, [{"m": 1.0}] * 2, 10.0, lambda rates: faster, MoveCosts(4.0, 9.0), 20.0)
    assert table.switches == (Switch(14.0, end=(0,)), Switch(14.0, begin=(1,)))


def test_another_mig_layout_ends_what_runs_on_the_gpu_at_once_and_takes_longer() -> None:
    def map_of_slice(profile: str) -> DeploymentMap:
        content = ONE.model_dump(by_alias=True)
        place = MigInstance(profile=profile, start=0).model_dump()
        content["nodes"][0]["gpus"][0]["partitions"][0]["mig"] = place
        return DeploymentMap.model_validate(content)

    table = make_timetable(
        map_of_slice("3g.40gb"),
        [{"m": 1.0}] * 2,
        10.0,
        lambda rates: map_of_slice("4g.40gb"),
        MoveCosts(4.0, 9.0),
        20.0,
    )
    assert table.switches == (Switch(10.0, end=(0,)), Switch(23.0, begin=(1,)))


def test_a_scheduler_that_gives_nothing_changes_nothing() -> None:
    table = make_timetable(ONE, [{"m": 1.0}] * 5, 10.0, lambda rates: None, MoveCosts(), 50.0)
    assert len(places_of(table.deployment)) == 1
    assert (table.switches, len(table.epochs)) == ((), 1)
    assert observed_rates(ONE, {"m": DeterministicArrivals(10.0)}, SimulationOptions(25.0), 10.0) == [
        {"m": 9.9},
        {"m": 10.0},
    ]


def test_a_gpu_that_was_not_in_use_is_cut_up_before_its_model_loads() -> None:
    content = TWO.model_dump(by_alias=True)
    content["nodes"][0]["gpus"][1]["partitions"][0]["mig"] = MigInstance(profile="3g.40gb", start=0).model_dump()
    grown = DeploymentMap.model_validate(content)
    table = make_timetable(ONE, [{"m": 1.0}] * 2, 10.0, lambda rates: grown, MoveCosts(4.0, 9.0), 20.0)
    assert table.switches == (Switch(23.0, begin=(1,)),)


def test_the_figures_of_following_a_load_are_those_of_its_maps_and_its_requests() -> None:
    table = follow_load()
    outcome = simulate(
        table.deployment, rising(), SimulationOptions(60.0, switches=table.switches, absent=table.absent)
    )
    figures = summarize_autoscaling("by load", table, outcome)
    assert (figures.maps, figures.started, figures.most_gpus, figures.mean_gpus) == (2, 1, 2, 1.5)
    assert figures.gpu_hours == pytest.approx(90.0 / 3600)
    model = outcome.models[0]
    assert figures.in_time_pct == pytest.approx(100.0 * model.in_time / model.requests)
    assert figures.wait_ms == pytest.approx(
        (model.stage_mean_ms["queue"] or 0) + (model.stage_mean_ms["batching"] or 0)
    )
    assert figures.worst_p99_ms == model.p99_ms
