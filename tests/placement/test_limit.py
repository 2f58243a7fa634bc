from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.placement import limit as module
from gpuprof.placement.contract import demand, plain_device, problem
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.segment import Segments


def test_what_is_kept_back_ends_the_limit_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    whole = Limit(10.0)
    now[0] = 103.0
    assert whole.spent_s == 3.0
    assert whole.keeping(4.0).left_s == 3.0
    assert not whole.keeping(6.9).is_over
    assert whole.keeping(7.0).is_over
    assert Limit().keeping(5.0).seconds is None


def test_questions_are_refused_when_the_time_is_up_and_answered_again_afterwards() -> None:
    asked = demand("m")
    given = problem([asked])
    segments = Segments(given)
    workload = Workload("m", 2, Share(50.0))
    segments.estimate(plain_device(), workload)
    with given.limits.until(Limit(0.0)):
        segments.estimate(plain_device(), workload)  # what is known is no question
        with pytest.raises(TimeUpError):
            segments.estimate(plain_device(), Workload("m", 4, Share(50.0)))
        with pytest.raises(TimeUpError):
            segments.meets(asked, plain_device(), workload, 1.0)
    assert segments.meets(asked, plain_device(), workload, 1.0)
