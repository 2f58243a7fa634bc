from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem
from gpuprof.placement.problem import Options
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import explain_unplaced


@dataclass
class EstimateCounter:
    known: LinearEstimator
    asked: list[tuple[int, bool]] = field(default_factory=list)

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        self.asked.append((batch, bool(beside)))
        return self.known.estimate(model, device, batch, share, beside, processes)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return self.known.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return self.known.shares(model, device)


def test_what_one_policy_asked_no_other_asks_again() -> None:
    estimator = EstimateCounter(LinearEstimator())
    given = problem([demand("m")], estimator=estimator)  # type: ignore[arg-type]
    workload, beside = Workload("m", 4, Share(50.0)), [Workload("m", 2, Share(50.0))]
    first = Segments(given)
    expected = first.server(plain_device(), workload), first.estimate(plain_device(), workload, beside)
    questions = list(estimator.asked)
    again = Segments(replace(given, options=replace(given.options, time_limit_s=1.0)))
    assert (again.server(plain_device(), workload), again.estimate(plain_device(), workload, beside)) == expected
    assert estimator.asked == questions


def test_what_is_refused_once_is_not_asked_again() -> None:
    @dataclass
    class Refusing(EstimateCounter):
        def estimate(self, *question: Any, **named: Any) -> Estimate:
            self.asked.append((question[2], False))
            raise InputError("nothing is known of it", "measure it")

    estimator = Refusing(LinearEstimator())
    given = problem([demand("m")], estimator=estimator)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(InputError, match="nothing is known of it"):
            Segments(given).estimate(plain_device(), Workload("m", 4, Share(50.0)))
    assert len(estimator.asked) == 1
    assert "nothing is known of it" in explain_unplaced(given, Segments(given), given.demands[0])
    question_count = len(estimator.asked)
    assert "nothing is known of it" in explain_unplaced(given, Segments(given), given.demands[0])
    assert len(estimator.asked) == question_count


def test_another_estimator_and_another_confidence_have_answers_of_their_own() -> None:
    given = problem([demand("m")], estimator=LinearEstimator(interval=0.2))
    workload = Workload("m", 4, Share(50.0))
    means = Segments(given).server(plain_device(), workload).latency_ms
    slower = replace(given, estimator=LinearEstimator(start_ms=9.0))
    careful = replace(given, options=Options(confidence=0.9))
    assert Segments(slower).server(plain_device(), workload).latency_ms > means
    assert Segments(careful).server(plain_device(), workload).latency_ms > means
    assert Segments(given).server(plain_device(), workload).latency_ms == means
