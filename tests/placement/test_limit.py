from dataclasses import replace
from types import SimpleNamespace

import pytest
from pytest import approx

from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.machine import machine_code as module
from gpuprof.placement.contract import demand, plain_device, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.limit import Limit, TimeUpError, early_stop
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.segment import Segments

GIVEN = problem([demand("a", 20.0), demand("b", 20.0)])


def test_what_may_be_computed_in_any_case_is_counted_by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cpu = [100.0], [7.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: cpu[0]))
    whole = Limit(2.0)
    now[0], cpu[0] = 103.0, 7.5  # other programs had the processors
    least = whole.with_least(1.0)
    assert whole.is_over and not least.is_over and least.keeping(1.0).left_s == approx(0.5)
    assert least.left_s == approx(1.0)
    now[0], cpu[0] = 106.0, 8.25
    assert least.left_s == approx(0.25)
    cpu[0] = 8.6
    assert least.is_over
    assert Limit(20.0).with_least(1.0).left_s == approx(20.0)
    waiting = Limit(2.0).with_least(1.0)
    now[0] += 5.0
    assert waiting.is_over
    assert Limit().with_least(1.0).left_s is None


def test_questions_are_refused_when_the_time_is_up_and_answered_again_afterwards() -> None:
    wanted = demand("m")
    given = problem([wanted])
    segments = Segments(given)
    workload = Workload("m", 2, Share(50.0))
    segments.estimate(plain_device(), workload)
    with given.limits.until(Limit(0.0)):
        segments.estimate(plain_device(), workload)  # what is known is no question
        with pytest.raises(TimeUpError):
            segments.estimate(plain_device(), Workload("m", 4, Share(50.0)))
        with pytest.raises(TimeUpError):
            segments.meets(wanted, plain_device(), workload, 1.0)
    assert segments.meets(wanted, plain_device(), workload, 1.0)


def test_a_map_whose_search_was_not_stopped_says_nothing() -> None:
    assert early_stop(to_map(GIVEN, Optimal().place(GIVEN))) is None


def test_a_stopped_search_is_told_with_its_bounds() -> None:
    placement = replace(
        Optimal().place(GIVEN), stopped=True, lower_bound_gpus=1, lower_bound_cost_per_hour=0.5, found_by="first fit"
    )
    deployment = to_map(GIVEN, placement)
    settings = deployment.planned_with
    assert (settings.found_by, settings.stopped_by) == ("first fit", "time limit")
    assert early_stop(deployment) == (
        "the time limit ended the search early: 1 device, the least that any map takes; "
        "1 $/h, and none costs less than 0.5"
    )
    line = early_stop(deployment, 7.5)
    assert line is not None and line.startswith(
        "the time limit of 7.5 s ended the search early (--time-limit gives it longer): 1 device,"
    )
    fewer = deployment.model_copy(update={"predicted": deployment.predicted.model_copy(update={"lower_bound_gpus": 0})})
    assert "1 device, and no map takes fewer than 0" in str(early_stop(fewer))


def test_without_a_bound_it_says_so_and_on_a_fixed_fleet_what_could_be_served_at_most() -> None:
    placement = replace(Optimal().place(GIVEN), stopped=True, lower_bound_gpus=None, lower_bound_cost_per_hour=None)
    assert early_stop(to_map(GIVEN, placement)) == "the time limit ended the search early: no bound is known"
    fixed = problem([demand("a", 20.0)], [(plain_device(), 1)])
    bounded = replace(
        Optimal().place(fixed),
        stopped=True,
        lower_bound_gpus=None,
        lower_bound_cost_per_hour=None,
        upper_bound_goodput_rps=30.0,
    )
    line = early_stop(to_map(fixed, bounded))
    assert line == "the time limit ended the search early: 20 requests/s, and none serves more than 30"
