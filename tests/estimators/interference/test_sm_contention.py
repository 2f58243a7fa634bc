"""Replicas that share all SMs, on the thesis's profiles and its one measured pair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof.domain.estimate import Estimator, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.estimators.interference.colocation import Colocations
from gpuprof.estimators.interference.sm_contention import is_sharing_all_sms, slow_by_contention
from tests.published_measurements import thesis_estimator, v100


@pytest.fixture(scope="module")
def thesis_profiles() -> Estimator:
    return thesis_estimator("database")


def whole(model: str, batch: int) -> Workload:
    return Workload(model, batch, Share())


def test_models_that_leave_sms_to_one_another_are_not_slowed_on_average() -> None:
    figure = slow_by_contention(Figure(10.0, "measured"), 40.0, [30.0, 20.0])
    assert (figure.value, figure.low) == (10.0, 10.0)
    assert figure.high == pytest.approx(15.0)
    assert not figure.is_observed


def test_what_is_needed_beyond_all_sms_stretches_everybody_and_time_slices_are_the_worst() -> None:
    figure = slow_by_contention(Figure(10.0, "measured"), 80.0, [70.0])
    assert figure.value == pytest.approx(15.0)
    assert figure.high == pytest.approx(17.0)


def test_a_model_of_which_nothing_is_known_is_taken_to_keep_every_sm_busy() -> None:
    figure = slow_by_contention(Figure(10.0, "measured"), None, [None])
    assert figure.value == figure.high == 20.0
    assert "unknown" in figure.source


def test_only_wholes_of_the_same_part_share_all_sms() -> None:
    assert is_sharing_all_sms(whole("a", 1), [whole("b", 1)])
    assert not is_sharing_all_sms(whole("a", 1), [])
    assert not is_sharing_all_sms(whole("a", 1), [Workload("b", 1, Share(50.0))])
    assert not is_sharing_all_sms(whole("a", 1), [Workload("b", 1, Share(100.0, "3g.40gb"))])


def test_the_pair_that_the_thesis_measured_lies_within_the_interval(thesis_profiles: Estimator) -> None:
    # §6.2.1, observation 4: resnet50 beside alexnet, batches of 4, takes 8 ms; alone 6.8 ms
    beside = [whole("alexnet", 4)]
    latency = thesis_profiles.estimate("resnet50", v100(), 4, Share(), beside).latency_ms
    assert latency.low is not None and latency.high is not None
    assert latency.low <= 8.0 <= latency.high
    assert "SM contention" in latency.source


def test_saturating_neighbours_cost_what_they_need_beyond_all_sms(thesis_profiles: Estimator) -> None:
    alone = thesis_profiles.estimate("resnet50", v100(), 128, Share()).latency_ms
    beside = thesis_profiles.estimate("resnet50", v100(), 128, Share(), [whole("alexnet", 128)]).latency_ms
    assert beside.value / alone.value == pytest.approx(0.9916 + 0.99, rel=1e-3)  # Table A.1: WSM of both


def test_cores_are_not_contended_for_as_sms_are() -> None:
    colocations = Colocations(None, lambda device, workload: None)
    figure = colocations.beside(Figure(1.0, "measured"), replace(v100(), kind="cpu"), whole("a", 1), [whole("b", 1)])
    assert "contention" not in figure.source
