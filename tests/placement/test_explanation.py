"""Why a map is as it is: alternatives, neighbours, and what was not placed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.errors import InputError
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.explanation import (
    TOGETHER,
    UNKNOWN,
    NeighbourEffect,
    find_alternatives,
    list_neighbour_effects,
    locate_replicas,
    run_what_ifs,
)
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import KnownAnswers, Options, Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import NO_TIME, explain_unplaced, with_reasons

GIVEN = problem([demand("m", 780.0, 24.0), demand("other", 5.0)], options=Options(latency_budget=0.5))


def test_the_shares_that_could_serve_are_listed_cheapest_first() -> None:
    deployment = to_map(GIVEN, FirstFitDecreasing().place(GIVEN))
    alternatives = find_alternatives(GIVEN, deployment, "m")
    assert [choice.cost for choice in alternatives] == sorted(choice.cost for choice in alternatives)
    assert sum(choice.chosen for choice in alternatives) == sum(
        replica.model == "m" for *_, replica in deployment.places()
    )
    whole = next(choice for choice in alternatives if choice.segment.share.is_whole)
    # batch 8 takes 10 ms of the 12 allowed: 800 requests/s
    assert (whole.replicas, whole.segment.batch) == (1, 8)


def test_what_more_rate_and_less_slo_would_change_is_computed_anew() -> None:
    now, faster, tighter = run_what_ifs(GIVEN, Optimal(), "m")
    assert (now.change, faster.change, tighter.change) == ("as it is", "10% more rate", "10% less SLO")
    assert now.missing_rps == faster.missing_rps == tighter.missing_rps == 0.0
    # 858 requests/s are more than one whole device serves
    assert faster.shares != now.shares
    assert sum(count for _, count in faster.shares) >= 2
    assert faster.gpus == now.gpus == 2


def test_where_a_model_stands_is_said_with_its_neighbours_and_what_is_free() -> None:
    shared = problem([demand("m", 20.0), demand("other", 5.0)])
    deployment = to_map(shared, FirstFitDecreasing().place(shared))
    (seat,) = locate_replicas(deployment, "m")
    ours, theirs = (next(r for *_, r in deployment.places() if r.model == model) for model in ("m", "other"))
    assert seat.where == "node0 plain 0"
    assert seat.beside == (f"other {theirs.sm_share_pct:g}%",)
    assert seat.free_pct == 100.0 - ours.sm_share_pct - theirs.sm_share_pct
    assert (seat.share, seat.batch, seat.rate_rps) == (f"{ours.sm_share_pct:g}%", ours.batch, 20.0)


def test_a_share_that_is_not_listed_is_said_with_those_next_to_it() -> None:
    given = problem([demand("m", 20.0)], options=Options(latency_budget=0.5))
    placed = PlacedReplica("m", 1, 1, Share(15.0), 20.0)
    deployment = to_map(given, Placement("test", (PlacedGpu("plain", (PlacedPartition((placed,)),)),)))
    counts = {choice.segment.share.sm_pct: choice.chosen for choice in find_alternatives(given, deployment, "m")}
    assert {share: count for share, count in counts.items() if count} == {15.0: 1}
    assert set(counts) >= {12.5, 15.0, 17.5, 25.0, 50.0, 100.0}


def test_shares_below_all_listed_ones_are_said_however_small() -> None:
    given = problem([demand("m", 5.0, 2000.0)])
    placed = PlacedReplica("m", 1, 1, Share(25.0), 5.0)
    deployment = to_map(given, Placement("test", (PlacedGpu("plain", (PlacedPartition((placed,)),)),)))
    listed = [choice.segment.share.sm_pct for choice in find_alternatives(given, deployment, "m")]
    assert listed[:3] == [2.5, 5.0, 7.5]


def test_as_many_replicas_are_said_as_one_router_needs_and_no_more() -> None:
    given = problem([demand("m", 3000.0, 24.0)])
    deployment = to_map(given, Optimal().place(given))
    for choice in find_alternatives(given, deployment, "m"):
        server = Segments(given).server(plain_device(), choice.segment.workload)

        def tail_ms(count: int, server: BatchServer = server) -> float:
            return given.queueing.pool(Arrivals(3000.0), (server,) * count).whole.percentile(99.0)

        assert tail_ms(choice.replicas) <= 24.0 < tail_ms(choice.replicas - 1)
        assert choice.tail_ms == tail_ms(choice.replicas)


@dataclass(frozen=True, slots=True)
class BesideEstimator(LinearEstimator):
    """Says of each neighbour by how much it slows down, and of the whole where that comes from."""

    by_model: tuple[tuple[str, float], ...] = ()
    suffix: str = ""
    widening: float = 1.0
    refuses: bool = False

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        estimate = LinearEstimator.estimate(self, model, device, batch, share, (), processes)
        if not beside:
            return estimate
        if self.refuses:
            raise InputError("nothing is known beside others")
        value = estimate.latency_ms.value * (
            1.0 + sum(dict(self.by_model).get(neighbour.model, 0.0) for neighbour in beside)
        )
        ends = (value / self.widening, value * self.widening) if self.widening > 1.0 else (None, None)
        return replace(estimate, latency_ms=Figure(value, estimate.latency_ms.source + self.suffix, *ends))


def _effects(estimator: BesideEstimator, model: str = "m") -> tuple[NeighbourEffect, ...]:
    given: Problem = problem([demand("m", 5.0), demand("big", 5.0), demand("small", 5.0)])
    parts = (("m", 40.0), ("big", 30.0), ("small", 10.0), ("small", 10.0))
    replicas = tuple(PlacedReplica(name, 2, 1, Share(pct), 2.5) for name, pct in parts)
    placed = Placement("test", (PlacedGpu("plain", (PlacedPartition(replicas),)),))
    calm = to_map(given, placed)
    return list_neighbour_effects(replace(given, estimator=estimator), calm, model)


def test_each_neighbour_is_told_with_what_the_batch_would_take_less_without_it() -> None:
    big, small = _effects(BesideEstimator(by_model=(("big", 0.2), ("small", 0.05)), suffix=" × linear", widening=1.1))
    # a batch of 2 takes (2 + 2 · 1) / 0.4 = 10 ms alone, and 10 · (1 + 0.2 + 2 · 0.05) ms beside all three
    assert (big.neighbour, small.neighbour) == ("big 30%, batch 2", "2 × small 10%, batch 2")
    assert (big.alone_ms, big.beside_ms) == pytest.approx((10.0, 13.0))
    assert big.added_ms == pytest.approx(2.0) and small.added_ms == pytest.approx(1.0)
    assert big.interval_ms == pytest.approx((13.0 / 1.1, 13.0 * 1.1))
    assert big.basis == "measured × linear"


def test_what_is_known_from_measurements_and_what_is_not_known_are_told_apart() -> None:
    assert {effect.basis for effect in _effects(BesideEstimator(by_model=(("big", 0.2),)))} == {TOGETHER}
    assert {effect.basis for effect in _effects(BesideEstimator(widening=1.35))} == {UNKNOWN}
    assert _effects(BesideEstimator(refuses=True)) == ()


def test_a_rate_beyond_all_replicas_is_not_put_down_to_a_fleet_that_has_no_end() -> None:
    given = problem([demand("m", 1e300)])
    reason = explain_unplaced(given, Segments(given), given.demands[0])
    assert reason == "10000 replicas, the most that are planned, serve too little"


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
