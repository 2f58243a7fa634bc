from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import LinearEstimator, demand, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.explanation import (
    TOGETHER,
    UNKNOWN,
    NeighbourEffect,
    describe_joint_effects,
    list_neighbour_effects,
)
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Problem


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


class _ConstantEstimator(BesideEstimator):
    """Says that a batch takes a tenth longer beside others, whichever and how many they are."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        estimate = LinearEstimator.estimate(self, model, device, batch, share, (), processes)
        return replace(estimate, latency_ms=Figure(1.1 * estimate.latency_ms.value, "constant")) if beside else estimate


def test_neighbours_that_slow_a_batch_down_whichever_they_are_are_not_told_to_add_nothing() -> None:
    same, each = _effects(_ConstantEstimator()), _effects(BesideEstimator(by_model=(("big", 0.2), ("small", 0.05))))
    assert [effect.added_ms for effect in same] == [0.0, 0.0]
    (sentence,) = describe_joint_effects(same)
    assert "together add 1 ms" in sentence and sentence.endswith("(known from constant)")
    assert list(describe_joint_effects(each)) == []


def test_what_is_known_from_measurements_and_what_is_not_known_are_told_apart() -> None:
    assert {effect.basis for effect in _effects(BesideEstimator(by_model=(("big", 0.2),)))} == {TOGETHER}
    assert {effect.basis for effect in _effects(BesideEstimator(widening=1.35))} == {UNKNOWN}
    assert _effects(BesideEstimator(refuses=True)) == ()


def test_a_replica_with_a_device_to_itself_has_no_neighbours() -> None:
    given = problem([demand("m", 5.0)])
    placed = PlacedReplica("m", 1, 1, Share(50.0), 5.0)
    alone = to_map(given, Placement("test", (PlacedGpu("plain", (PlacedPartition((placed,)),)),)))
    assert list_neighbour_effects(given, alone, "m") == ()
