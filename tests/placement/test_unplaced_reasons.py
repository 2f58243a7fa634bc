from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem
from gpuprof.placement.limit import Limit
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import KnownAnswers, Options
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import NO_TIME, explain_unplaced, with_reasons


def test_a_rate_beyond_all_replicas_is_not_put_down_to_a_fleet_that_has_no_end() -> None:
    given = problem([demand("m", 1e300)])
    reason = explain_unplaced(given, Segments(given), given.demands[0])
    assert reason == "10000 replicas, the most that are planned, serve too little"


def test_a_full_fleet_is_named_with_its_counts() -> None:
    given = problem([demand("m", 50.0)], [(plain_device(), 2)])
    assert "no place was found for it on 2 plain" in explain_unplaced(given, Segments(given), given.demands[0])


def test_reasons_that_were_not_wanted_are_found_for_the_map_that_is_chosen() -> None:
    given = problem([demand("m", 50.0, 1.0)], options=Options(explains=False))
    made = FirstFitDecreasing().place(given)
    wanted = replace(given, options=Options())
    assert "nearly idle" not in made.unplaced[0].reason
    assert "nearly idle" in with_reasons(wanted, made, Limit()).unplaced[0].reason
    forgotten = replace(wanted, answers=KnownAnswers())
    assert with_reasons(forgotten, made, Limit(0.0)).unplaced[0].reason == NO_TIME


class FullBatchesOnly(LinearEstimator):
    """Knows the time of batches of four and of no others."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        if batch != 4:
            raise InputError(f"{model} was not measured at batch {batch}")
        return super().estimate(model, device, batch, share, beside, processes)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return (4,)


def test_what_is_not_known_of_small_batches_is_not_put_down_to_memory() -> None:
    given = problem([demand("m", 50.0)], estimator=FullBatchesOnly())
    reason = explain_unplaced(given, Segments(given), given.demands[0])
    assert reason == (
        "batches of m that are not full are not known on plain: m was not measured at batch 1 "
        "(a queue needs their times; --latency-budget plans without them)"
    )


def test_of_many_kinds_of_devices_that_cannot_serve_it_one_is_told_and_the_others_are_counted() -> None:
    kinds = [(plain_device(f"d{number}"), None) for number in range(20)]
    given = problem([demand("m", 50.0)], kinds, FullBatchesOnly())
    reason = explain_unplaced(given, Segments(given), given.demands[0])
    assert reason == (
        "batches of m that are not full are not known on d0: m was not measured at batch 1 (a queue needs their times; "
        "--latency-budget plans without them); nor can any of the other 19 kinds of devices serve it"
    )


def test_devices_that_a_policy_leaves_idle_are_named_instead_of_more_devices() -> None:
    dear = plain_device("other", 2.0)
    given = problem([demand("m", 50.0)], [(plain_device(), 1), (dear, 2)])
    busy = PlacedGpu("other", (PlacedPartition((PlacedReplica("n", 4, 1, Share(100.0), 1.0),)),))
    reason = explain_unplaced(given, Segments(given), given.demands[0], Placement("some", (busy,)))
    assert (
        reason == "some leaves 1 plain and 1 other idle, where some of it could be served; another policy may place it"
    )
    floor = replace(given.demands[0], min_goodput_rps=40.0)
    assert "if not its min_goodput_rps of 40" in explain_unplaced(given, Segments(given), floor, Placement("some", ()))
