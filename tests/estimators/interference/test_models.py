"""Interference models: each learns the law that it assumes; replicas without shares, on the thesis's profiles."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import pytest

from bench.interference import LinearInterference, evaluate
from gpuprof.domain.estimate import Estimator, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.estimators.igniter.igniter import HardwareCoefficients, WorkloadCoefficients
from gpuprof.estimators.interference.colocation import (
    ColocatedWorkload,
    Colocations,
    ConstantInterference,
    ContentionModel,
    IgniterInterference,
    InterferenceModel,
    NoInterference,
    RunningWorkload,
    is_sharing_all_sms,
    leave_out,
    rank_interference_models,
    slow_by_contention,
)
from tests.published_measurements import thesis_estimator, v100

GPU = HardwareCoefficients(300.0, 1530.0, 53.5, 1e7, -1.025, 0.00475, -0.00902)
WORKLOAD = WorkloadCoefficients(6e5, 4e3, 80, 0.001, (0.0, 0.6, 0.1, 0.01, 1.5), 0.002, (160.0, 5.0), (25.0, 1.0))


def _running(model: str, random: np.random.Generator) -> RunningWorkload:
    solo = float(random.uniform(1.0, 30.0))
    return RunningWorkload(
        model=model,
        batch=int(random.integers(1, 33)),
        share=0.5,
        solo_ms=solo,
        l2_pct=float(random.uniform(2.0, 30.0)),
        dram_pct=float(random.uniform(2.0, 30.0)),
        kernels=int(random.integers(10, 100)),
        transfer_ms=solo * float(random.uniform(0.01, 0.4)),
        power_w=float(random.uniform(50.0, 200.0)),
    )


def _pairs(slowdown: InterferenceModel, rows: int = 120) -> list[ColocatedWorkload]:
    random = np.random.default_rng(3)
    pairs = []
    for i in range(rows):
        victim, neighbour = _running("abc"[i % 3], random), _running("abc"[(i // 3) % 3], random)
        pairs.append(ColocatedWorkload(victim, (neighbour,), victim.solo_ms * slowdown.slowdown(victim, (neighbour,))))
    return pairs


def _contention(weights: list[float]) -> ContentionModel:
    model = ContentionModel(GPU)
    model.weights_ = np.array(weights)
    return model


def test_ours_learns_what_each_resource_costs_and_carries_it_to_an_unseen_model() -> None:
    truth = _contention([1.0, 5.0, 0.2, 0.3, 0.2, 0.5])
    measured = _pairs(truth)
    assert ContentionModel(GPU).fit(measured).weights_ == pytest.approx(truth.weights_, abs=1e-6)
    assert evaluate("ours", lambda: ContentionModel(GPU), measured, "victim").mean_pct < 1e-6


def test_ours_never_speeds_anybody_up() -> None:
    faster = [ColocatedWorkload(row.victim, row.beside, 0.7 * row.victim.solo_ms) for row in _pairs(NoInterference())]
    model = ContentionModel(GPU).fit(faster)
    assert all(model.slowdown(row.victim, row.beside) >= 1.0 for row in faster)


def test_linear_learns_a_linear_law() -> None:
    truth = LinearInterference()
    truth.weights_ = np.array([1.0, 0.001, 0.002, 0.003, 0.004])
    assert evaluate("linear", LinearInterference, _pairs(truth), "pair").worst_pct < 1e-6


def test_constant_is_the_mean_slowdown() -> None:
    random = np.random.default_rng(1)
    victim, neighbour = _running("a", random), _running("b", random)
    rows = [ColocatedWorkload(victim, (neighbour,), victim.solo_ms * factor) for factor in (1.1, 1.3)]
    assert ConstantInterference().fit(rows).slowdown(victim, (neighbour,)) == pytest.approx(1.2)


@pytest.mark.parametrize(
    "make", [NoInterference, ConstantInterference, LinearInterference, lambda: ContentionModel(GPU)]
)
def test_without_neighbours_nothing_is_slower(make: type[InterferenceModel]) -> None:
    measured = _pairs(_contention([1.0, 5.0, 0.2, 0.3, 0.2, 0.5]))
    assert make().fit(measured).slowdown(measured[0].victim, ()) == 1.0


def test_igniter_slows_down_with_each_neighbour() -> None:
    model = IgniterInterference(GPU, {"net": WORKLOAD})
    victim = RunningWorkload("net", 8, 0.3, 20.0)
    slow = [model.slowdown(victim, [victim] * count) for count in range(4)]
    assert slow[0] == 1.0 and slow == sorted(slow) and slow[3] > slow[1] > 1.0


def _with_names(rows: list[ColocatedWorkload], names: str) -> list[ColocatedWorkload]:
    return [row for row in rows if {row.victim.model, row.beside[0].model} <= set(names)]


def test_a_model_that_is_left_out_is_in_neither_role_of_what_is_learnt() -> None:
    rows = _pairs(_contention([1.0, 5.0, 0.2, 0.3, 0.2, 0.5]))
    model_names: list[set[str]] = []

    class RecordingInterference(ConstantInterference):
        def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
            model_names.append({name for row in measured for name in (row.victim.model, row.beside[0].model)})
            super().fit(measured)
            return self

    scores = leave_out(RecordingInterference, rows, "model")
    assert model_names == [{"b", "c"}, {"a", "c"}, {"a", "b"}]
    without = [row for row in rows if row not in _with_names(rows, "bc")]
    assert sum(score.unit == "a" for score in scores) == len(without)
    assert sum(score.unit == "a" and score.is_victim for score in scores) == sum(
        row.victim.model == "a" for row in without
    )


def test_models_are_ranked_by_both_roles_and_their_interval_holds_a_new_model() -> None:
    random = np.random.default_rng(5)
    truth = _contention([1.0, 5.0, 0.2, 0.3, 0.2, 0.5])
    rows = [
        ColocatedWorkload(row.victim, row.beside, row.latency_ms * float(random.normal(1.0, 0.02)))
        for row in _pairs(truth, 300)
    ]
    ranked = rank_interference_models(rows, (GPU, {}))
    assert {row.left_out for row in ranked} == {"model"}
    best = ranked[0]
    new = [_running("new", random) for _ in range(200)]
    held = 0
    for victim, row in zip(new, rows, strict=False):
        slowdown = truth.slowdown(victim, row.beside) * float(random.normal(1.0, 0.02))
        held += best.low <= slowdown / best.model.slowdown(victim, row.beside) <= best.high
    assert 0.85 * len(new) <= held


def test_two_models_are_judged_by_the_victim() -> None:
    both = _with_names(_pairs(_contention([1.0, 5.0, 0.2, 0.3, 0.2, 0.5])), "ab")
    rows = [row for row in both if row.victim.model != row.beside[0].model]
    assert {row.left_out for row in rank_interference_models(rows, (GPU, {}))} == {"victim"}


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
