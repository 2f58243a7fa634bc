"""The reproductions of iGniter's figures, with the coefficients fitted to its published profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.igniter_profiles import table_3
from bench.reproduce import (
    igniter_fig4,
    igniter_fig12,
    igniter_fig14,
    igniter_fig18,
    igniter_fig20,
    igniter_fig21,
    igniter_table1,
)
from bench.reproduce.igniter_runs import place, problem, with_interference
from bench.reproduce.stand_in_db import scale_coefficients
from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.estimators.igniter.igniter_estimator import IgniterEstimator
from tests.bench.published import write_igniter
from tests.placement.published.test_igniter import HARDWARE, MODELS

V100 = device("v100")
NOWHERE = Path("nowhere")


@pytest.fixture(autouse=True)
def work_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # demands are written where the reproductions are started


@pytest.fixture
def estimator() -> IgniterEstimator:
    return IgniterEstimator(
        None, coefficients={"v100": (HARDWARE, {name: MODELS[model] for name, model in table_3()[0].items()})}
    )


@pytest.mark.slow
def test_figure_14_gpus_and_broken_slos_are_those_of_the_caption(
    estimator: IgniterEstimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(igniter_fig14, "v100_estimator", lambda _: estimator)
    found = igniter_fig14.compute(NOWHERE)
    assert found.sound
    assert found.row("igniter")[:3] == pytest.approx((6.0, 18.36, 0.0))
    assert found.row("gpulet blind")[:3] == pytest.approx((8.0, 24.48, 3.0))
    assert found.row("gpulet")[2] == 0.0
    gpus, cost, broken = found.row("ffd+")[:3]
    assert (gpus, cost) == pytest.approx((5.0, 15.30))
    assert isinstance(broken, float)
    assert broken >= 3.0


def test_figure_20_the_t4_is_chosen_where_it_is_cheaper(
    estimator: IgniterEstimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = estimator.coefficients(V100)
    both = IgniterEstimator(None, coefficients={"v100": known, "t4": scale_coefficients(known, "t4")})
    monkeypatch.setattr(igniter_fig20, "estimate_igniter", lambda *_: both)
    monkeypatch.setattr(igniter_fig20, "name_services", lambda estimator, _: estimator)
    monkeypatch.setattr(igniter_fig20, "find_profile", lambda reference: reference)
    found = igniter_fig20.compute(NOWHERE)
    assert found.sound
    assert found.row("t4 or v100")[:2] == found.row("t4")[:2]
    few, many = found.row("v100")[0], found.row("t4")[0]
    assert isinstance(few, float)
    assert isinstance(many, float)
    assert 2 * few <= many <= 3 * few
    assert all(fact.agrees for fact in found.facts if fact.what.startswith("T4 that"))


def test_the_stand_in_of_another_gpu_computes_slower_and_loads_as_fast(estimator: IgniterEstimator) -> None:
    v100, workloads = estimator.coefficients(V100)
    t4, slower = scale_coefficients((v100, workloads), "t4")
    ratio = V100.flops_per_s["float32"] / device("t4").flops_per_s["float32"]
    here, there = workloads["W9"], slower["W9"]
    assert there.active_ms(8, 0.5) == pytest.approx(ratio * here.active_ms(8, 0.5))
    assert there.power_w(8, 0.5) / t4.max_power_w == pytest.approx(here.power_w(8, 0.5) / v100.max_power_w)
    assert there.l2_pct(8, 0.5) == pytest.approx(here.l2_pct(8, 0.5))
    assert there.load_bytes == here.load_bytes


def test_estimators_are_asked_by_device_and_of_neighbours(estimator: IgniterEstimator) -> None:
    known = estimator.coefficients(V100)
    both = IgniterEstimator(None, coefficients={"v100": known, "t4": scale_coefficients(known, "t4")})
    share, beside = Share(40.0), [Workload("W9", 6, Share(60.0))]
    alone = estimator.estimate("W1", V100, 4, share)
    assert both.estimate("W1", V100, 4, share) == alone
    assert both.estimate("W1", device("t4"), 4, share).latency_ms.value > alone.latency_ms.value
    assert both.estimate("W1", V100, 4, share, beside).latency_ms.value > alone.latency_ms.value


def test_a_map_is_simulated_with_the_times_beside_all_on_the_same_gpu(estimator: IgniterEstimator) -> None:
    deployment = place(problem(estimator, ("v100",)), "igniter", "igniter").deployment
    assert deployment is not None
    served, legs = with_interference(deployment, estimator)
    for (_, _, part, planned), (_, _, _, replica) in zip(deployment.places(), served.places(), strict=True):
        assert replica.batch_latency_ms is not None
        whole = replica.batch_latency_ms[-1] + legs[replica.model][0]
        assert whole == pytest.approx(planned.predicted.latency_ms)
        assert (
            len(part.replicas) == 1
            or whole
            > estimator.estimate(replica.model, V100, replica.batch, Share(replica.sm_share_pct)).latency_ms.value
        )


def test_figure_12_compares_each_published_pair_with_what_is_predicted_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = IgniterEstimator(None, coefficients={"v100": (HARDWARE, MODELS)})
    monkeypatch.setattr(igniter_fig12, "published_estimator", lambda *_: model)
    beside = [Workload("vgg19", 4, Share(50.0))]
    said = model.estimate("alexnet", V100, 8, Share(50.0), beside).latency_ms.value
    folder = tmp_path / "igniter_v100"
    folder.mkdir()
    header = "pair,model,batch,mps_share_pct,latency_ms,beside,beside_batch,beside_mps_share_pct"
    (folder / "pairs.csv").write_text(f"{header}\n0,alexnet,8,50,{said / 1.25},vgg19,4,50\n")
    found = igniter_fig12.compute(tmp_path)
    assert found.row("alexnet") == pytest.approx((1.0, 25.0, 25.0))


@pytest.mark.slow
def test_figure_18_has_the_shares_that_the_text_says_and_the_neighbours(
    estimator: IgniterEstimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(igniter_fig18, "v100_estimator", lambda _: estimator)
    found = igniter_fig18.compute(NOWHERE)
    assert [fact.agrees for fact in found.facts[:3]] == [True] * 3
    assert found.row("igniter")[:2] == (20.0, 7.5)
    assert found.row("igniter")[-1] == "W3"


def test_figure_21_gives_optimal_as_many_workloads_and_no_more_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "igniter_v100").mkdir()
    monkeypatch.setattr(
        igniter_fig21,
        "published_estimator",
        lambda *_: IgniterEstimator(None, coefficients={"v100": (HARDWARE, MODELS)}),
    )
    monkeypatch.setattr(igniter_fig21, "_LIMIT_S", 1.0)
    found = igniter_fig21.compute(tmp_path, (3, 14))
    assert [row[0] for row in found.rows] == ["3", "14"]
    assert all(isinstance(row[3], float) and isinstance(row[5], float) and row[5] <= row[3] for row in found.rows)


def test_figures_4_to_9_set_what_was_published_beside_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_igniter(tmp_path, ("resnet50",))
    pairs = [
        igniter_fig12.Pair(
            Workload("resnet50", 16, Share(50.0)), Workload("vgg19", batch, Share(50.0)), seen, said, 20.0
        )
        for batch, seen, said in ((2, 21.0, 20.5), (32, 23.0, 22.0))
    ]
    other = igniter_fig12.Pair(Workload("resnet50", 8, Share(50.0)), Workload("vgg19", 2, Share(50.0)), 30.0, 9.0, 20.0)
    monkeypatch.setattr(igniter_fig4, "read_pairs", lambda _: [*pairs, other])
    found = igniter_fig4.compute(tmp_path)
    slower = [row[3:5] for row in found.rows if row[0] == "4"]
    assert slower == [pytest.approx((5.0, 2.5)), pytest.approx((15.0, 10.0))]
    assert [row[0] for row in found.rows].count("8") == 9
    delay = [row for row in found.rows if row[0] == "5"]
    assert [row[3] for row in delay] == [0.0014, 0.0017, 0.0068, 0.0119, 0.017]
    clock = [row[4] for row in found.rows if row[1] == "frequency, MHz"]
    assert clock[:3] == [1530.0] * 3
    assert isinstance(clock[4], float) and clock[4] < 1530.0
    assert [fact.agrees for fact in found.facts] == [False, False, True]
    active = [row[5] for row in found.rows if row[0] == "8"]
    assert all(isinstance(error, float) and abs(error) < 25.0 for error in active)


def test_table_1_is_igniters_and_blind_gpulets_break_slos() -> None:
    estimator = IgniterEstimator(None, coefficients={"v100": (HARDWARE, MODELS)})
    found = igniter_table1.compare_plans(estimator)
    assert found.sound
    assert all(fact.agrees for fact in found.facts if fact.what.startswith("igniter"))
    assert found.row("igniter")[0] == 1.0 and found.row("igniter")[2] == "none"
    assert found.row("gpulet blind")[0] == 2.0 and found.row("gpulet blind")[2] != "none"
    optimal = found.row("optimal")[0]
    assert isinstance(optimal, float) and optimal <= 1.0
