"""Policies on many equal devices: what one of them refused is not asked again."""

from __future__ import annotations

from collections import Counter

import pytest

from gpuprof.placement.bin import Bin
from gpuprof.placement.contract import LinearEstimator, demand, problem
from gpuprof.placement.placement import PlacedReplica
from gpuprof.placement.policies import make_policy
from gpuprof.placement.segment import Segments


def test_alpaserve_asks_no_device_twice_for_the_same_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: Counter[object] = Counter()
    original = Bin.add

    def add(gpu_bin: Bin, replica: PlacedReplica, segments: Segments) -> bool:
        taken = original(gpu_bin, replica, segments)
        attempts[id(gpu_bin), replica] += not taken
        return taken

    monkeypatch.setattr(Bin, "add", add)
    placed = make_policy("bench.baselines.alpaserve:AlpaServe").place(
        problem([demand("resnet", rate_rps=8100.0, slo_ms=100.0)], estimator=LinearEstimator(slowdown=0.2))
    )
    assert len(placed.gpus) >= 10 and not placed.unplaced
    assert attempts and max(attempts.values()) == 1
