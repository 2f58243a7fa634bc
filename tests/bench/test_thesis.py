"""The reproductions of the thesis's figures: its router, its shares, its policies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.published_measurements import v100
from bench.reproduce import (
    thesis_appendix,
    thesis_cluster,
    thesis_fig6_1,
    thesis_fig6_10,
    thesis_fig6_15,
    thesis_latencies,
    thesis_placements,
)
from bench.reproduce.stand_in_db import estimate_shared_v100, stretch_time_ms, write_stand_ins
from bench.reproduce.thesis_cluster import (
    Experiment,
    arrived_rps,
    as_served,
    first_gpus,
    goodput,
    in_turn,
    plan,
    rebuild_map,
)
from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.kernel_db.store import KernelDb

NOWHERE = Path("nowhere")
MS = 1_000_000


@pytest.fixture(autouse=True)
def work_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # demands are written where the reproductions are started


def test_the_router_fills_a_batch_and_goes_to_the_next_replica() -> None:
    parts = in_turn(np.arange(7) * MS, [2, 3])
    assert [part.tolist() for part in parts] == [[0, MS, 5 * MS, 6 * MS], [2 * MS, 3 * MS, 4 * MS]]


def test_the_router_sends_a_batch_whose_first_request_has_waited_long_enough() -> None:
    parts = in_turn(np.array([0, 99, 100, 130]) * MS, [4, 4])
    assert [part.tolist() for part in parts] == [[0, 99 * MS], [100 * MS, 130 * MS]]


@given(st.lists(st.integers(0, 10**9), max_size=60), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_the_router_sends_each_request_to_one_replica(times: list[int], batches: list[int]) -> None:
    parts = in_turn(np.array(sorted(times), np.int64), batches)
    assert sorted(time for part in parts for time in part.tolist()) == sorted(times)
    assert all((np.diff(part) >= 0).all() for part in parts)


def test_a_share_below_the_sms_that_a_batch_keeps_busy_stretches_its_time() -> None:
    alone = stretch_time_ms("resnet50", 4)
    assert alone == pytest.approx(1000.0 * 4 / 589.78)
    assert stretch_time_ms("resnet50", 4, 17.55) == pytest.approx(alone * 36.26 / 17.55)  # Table A.1
    assert stretch_time_ms("resnet50", 4, 50.0) == alone
    assert stretch_time_ms("resnet50", 1) == alone
    assert stretch_time_ms("resnet50", 6) == pytest.approx((alone + 1000.0 * 8 / 829.08) / 2)


@pytest.mark.parametrize(("batch", "share"), [(1, 17.5), (4, 35.0), (6, 37.5), (128, 100.0)])
def test_maps_are_simulated_by_the_times_that_the_estimator_planned_with(batch: int, share: float) -> None:
    said = estimate_shared_v100().estimate("resnet50", v100(), batch, Share(share))
    assert stretch_time_ms("resnet50", batch, share) == pytest.approx(said.latency_ms.value)


def test_another_gpu_is_as_much_quicker_as_its_peak(tmp_path: Path) -> None:
    shared = make_estimator("usher", KernelDb(write_stand_ins(tmp_path / "db", ["v100", "h100"], 50.0)))
    h100 = device("h100")
    ratio = h100.flops_per_s["float32"] / v100().flops_per_s["float32"]
    here, there = (shared.estimate("bert", gpu, 4, Share()) for gpu in (v100(), h100))
    assert here.latency_ms.value == pytest.approx(ratio * there.latency_ms.value)
    assert here.memory_bytes == there.memory_bytes


@pytest.mark.parametrize(("model", "batch"), [("resnet50", 129), ("resnet51", 4)])
def test_what_was_not_measured_is_refused(model: str, batch: int) -> None:
    with pytest.raises(InputError, match=f"{model} was not measured"):
        stretch_time_ms(model, batch)


def test_usher_needs_six_gpus_and_serves_everything_on_them() -> None:
    # §6.2.1
    made = plan("usher", thesis_fig6_1.EXPERIMENT, None)
    assert (made.gpus, made.sound, made.batch("efficientnet_b7")) == (6, True, 8)
    served, arrived = goodput(made, thesis_fig6_1.EXPERIMENT), arrived_rps(thesis_fig6_1.EXPERIMENT)
    assert sum(served.values()) > 0.95 * sum(arrived.values())
    assert all(served[model] <= arrived[model] + 1e-9 for model in served)


def test_shares_by_weighted_occupancy_are_too_small_to_serve_what_was_planned() -> None:
    # §6.2.1, observation 2
    made = plan("wao-usher", thesis_fig6_1.EXPERIMENT, 4)
    assert sum(goodput(made, thesis_fig6_1.EXPERIMENT).values()) < 0.5 * made.deployment.predicted.goodput_rps


def test_large_batches_are_late_where_small_ones_are_in_time() -> None:
    # §6.2.1, observation 3
    assert thesis_fig6_1.in_time_pct(64) < 60.0 < 95.0 < thesis_fig6_1.in_time_pct(8)


def test_a_plan_is_cut_off_after_the_gpus_that_there_are() -> None:
    experiment = Experiment(("resnet50",), 400.0, 200.0)
    made = rebuild_map(experiment, [{"resnet50": 8}] * 10)
    assert made.gpus == 10
    assert sum(len(node.gpus) for node in first_gpus(made.deployment, 9).nodes) == 9
    assert first_gpus(made.deployment, 3).nodes[0].gpus == made.deployment.nodes[0].gpus[:3]


def test_only_policies_that_set_shares_are_slowed_by_them() -> None:
    experiment = Experiment(("bert",), 100.0, 300.0)
    usher, milp = plan("usher", experiment, 4), plan("ao-milp", experiment, 4)
    alone = stretch_time_ms("bert", 4)
    for made, slower in ((usher, True), (milp, False)):
        first = next(replica for _, _, _, replica in as_served(made).places())
        assert first.model == "bert@0"
        assert first.batch_latency_ms is not None
        assert (first.batch_latency_ms[0] > alone * 1.01) is slower


@pytest.mark.slow
def test_the_figures_of_the_thesis_have_their_rows_and_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thesis_cluster, "_OWN_LIMIT_S", 0.5)
    one = thesis_fig6_1.compute(NOWHERE, (1,))
    assert one.sound
    ideal = one.row("ideal")[0]
    assert isinstance(ideal, float)
    assert all(isinstance(row[1], float) and 0.0 < row[1] <= ideal for row in one.rows)
    assert next(fact for fact in one.facts if fact.what == "GPUs that usher needs for all").agrees
    assert len(thesis_fig6_10.compute(NOWHERE, (1,)).rows) == 6
    load = thesis_fig6_15.compute(NOWHERE, (1000,), (350,))
    assert [fact.agrees for fact in load.facts] == [True]
    assert len(load.charts) == 1


@pytest.mark.slow
def test_each_map_of_the_thesis_stands_beside_the_best_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thesis_cluster, "_OWN_LIMIT_S", 2.0)
    found = thesis_placements.compute(NOWHERE, thesis_placements.MAPS[:1])
    assert found.sound
    (_, _, _, usher, text), (_, name, _, best, _) = found.rows
    assert name == "optimal"
    assert isinstance(usher, float) and isinstance(best, float) and best > 0.0
    assert text == "[alexnet 128 93%] [efficientnet_b7 8 93%]"


def test_optimal_is_served_by_its_own_rules_and_keeps_an_easy_slo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thesis_cluster, "_OWN_LIMIT_S", 1.0)
    experiment = thesis_fig6_15.experiment(1000, 350)
    made = plan("optimal", experiment, 4)
    assert made.sound
    assert sum(goodput(made, experiment).values()) > 0.95 * sum(arrived_rps(experiment).values())


def test_without_shares_wao_usher_is_no_longer_slowed_and_a_mix_has_its_weights() -> None:
    setting = next(thesis_appendix.list_settings())
    _, experiment, gpus = setting.at[3]
    for policy, gains in (("wao-usher", True), ("ao-milp", False)):
        apart, under = (plan(policy, experiment, gpus, shares) for shares in (setting.shares, True))
        without, held = (sum(goodput(made, experiment).values()) for made in (apart, under))
        assert (without > 1.5 * held) is gains
    mixed = list(thesis_appendix.list_settings())[2].at[0][1]
    assert sum(map(mixed.rate_of, mixed.models)) == pytest.approx(1000.0)
    assert mixed.rate_of("alexnet") == pytest.approx(2.0 * mixed.rate_of("bert"))


@pytest.mark.slow
def test_the_appendix_has_a_row_for_each_figure_and_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thesis_cluster, "_OWN_LIMIT_S", 0.5)
    setting = next(thesis_appendix.list_settings())
    found = thesis_appendix.compute(NOWHERE, [replace(setting, at=setting.at[:1])])
    assert [row[:2] for row in found.rows] == [("A.1", policy) for policy in thesis_cluster.POLICIES]
    assert len(found.charts) == 1


def test_the_router_waits_for_large_batches_and_few_of_them_are_full() -> None:
    # Figures 6.6 and 6.19
    found = thesis_latencies.compute(NOWHERE, thesis_latencies.list_watched_by_hand())
    assert found.sound
    rows = {(row[0], row[1]): dict(zip(found.header[3:], row[3:], strict=True)) for row in found.rows}
    small, large = rows["6.6", "two replicas of batch 8"], rows["6.6", "two replicas of batch 64"]
    assert number(large["batching"]) > 2.0 * number(small["batching"])
    assert number(large["in time/s"]) < 0.6 * number(small["in time/s"])
    assert number(large["answered/s"]) == pytest.approx(number(small["answered/s"]), rel=0.05)
    few, many = rows["6.19", "batch 64, 600 requests/s"], rows["6.19", "batch 64, 1000 requests/s"]
    assert number(few["mean batch"]) < number(many["mean batch"]) <= 64.0


def test_near_capacity_requests_wait_for_the_worker() -> None:
    # Figure 6.17: batches of 16 answer some 830 requests/s
    seen = []
    for rate_rps in (600.0, 820.0):
        experiment = Experiment(("densenet121",), rate_rps, 250.0)
        made = rebuild_map(experiment, [{"densenet121": 16}])
        one = thesis_latencies.Watched("6.17", f"{rate_rps:g}", made, experiment, "densenet121")
        found = thesis_latencies.compute(NOWHERE, [one])
        seen.append(number(found.column("queue")[0]))
    assert seen[1] > 2.0 * seen[0]


def number(cell: object) -> float:
    """Return a cell that must be a number."""
    assert isinstance(cell, float)
    return cell
