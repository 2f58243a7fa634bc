"""Databases of published measurements, imported and computed."""

import hashlib
from pathlib import Path

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.igniter.igniter import IgniterEstimator
from gpuprof.kernel_db.store import KernelDb
from gpuprof.lab.scenarios import (
    build_database,
    find_published,
    listed_demands,
    parvagpu_demands,
    read_mps_latencies,
    scale_coefficients,
    scale_v100,
    stretch_time_ms,
    usher_demands,
)
from tests.lab.published import write_igniter, write_parvagpu
from tests.placement.published.test_igniter import HARDWARE, MODELS

A100, V100, H100 = device("a100-80"), device("v100"), device("h100")


def test_an_mps_share_runs_as_its_part_of_the_instances(tmp_path: Path) -> None:
    folder = write_parvagpu(tmp_path / "data")
    database = KernelDb(build_database("parvagpu-mps", tmp_path / "work", folder))
    estimator = make_estimator("usher", database)

    def rate(pct: float, batch: int = 4) -> float:
        return 1000.0 * batch / estimator.estimate("a", A100, batch, Share(pct)).latency_ms.value

    assert rate(100.0) == pytest.approx(640.0)
    assert rate(42.5) == pytest.approx(287.75)  # 2.975 slices, on the line from two to three
    assert rate(77.5) == pytest.approx(503.5)  # 5.425, from four to seven
    assert rate(7.5) == pytest.approx(52.5)
    assert {workload.batch for workload in read_mps_latencies(folder / "parvagpu_a100")} == {1, 4}


def test_a_computed_row_says_that_it_was_not_measured(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    scale_v100(database, ["h100"])
    runs = database.read_table("runs", ["collector", "notes"])
    assert set(runs["collector"].to_pylist()) == {"computed"}
    assert all(str(note).startswith("no measurement") for note in runs["notes"].to_pylist())


def test_a_share_below_the_sms_that_a_batch_keeps_busy_stretches_its_time() -> None:
    alone = stretch_time_ms("resnet50", 4)
    assert alone == pytest.approx(1000.0 * 4 / 589.78)
    assert stretch_time_ms("resnet50", 4, 17.55) == pytest.approx(alone * 36.26 / 17.55)  # thesis, Table A.1
    assert stretch_time_ms("resnet50", 4, 50.0) == alone
    assert stretch_time_ms("resnet50", 1) == alone
    assert stretch_time_ms("resnet50", 6) == pytest.approx((alone + 1000.0 * 8 / 829.08) / 2)
    for model, batch in (("resnet50", 129), ("resnet51", 4)):
        with pytest.raises(InputError, match=f"{model} was not measured"):
            stretch_time_ms(model, batch)


def test_computed_shares_stretch_and_another_gpu_is_faster_by_its_peak(tmp_path: Path) -> None:
    """bert at batch 4 keeps 96.82% of a V100 busy (Table A.1): under 40% it takes 96.82 / 40 times as long."""
    database = KernelDb.create(tmp_path / "db")
    scale_v100(database, ["v100", "h100"], 10.0)
    estimator = make_estimator("usher", database)
    alone = estimator.estimate("bert", V100, 4, Share()).latency_ms.value
    assert estimator.estimate("bert", V100, 4, Share(40.0)).latency_ms.value == pytest.approx(alone * 96.82 / 40.0)
    ratio = V100.flops_per_s["float32"] / H100.flops_per_s["float32"]
    assert estimator.estimate("bert", H100, 4, Share()).latency_ms.value == pytest.approx(ratio * alone)
    assert estimator.shares("bert", V100) == tuple(Share(10.0 * number) for number in range(1, 11))


def test_scaled_coefficients_compute_slower_and_load_as_fast() -> None:
    v100, workloads = IgniterEstimator(None, coefficients={"v100": (HARDWARE, MODELS)}).coefficients(V100)
    t4, slower = scale_coefficients((v100, workloads), "t4")
    ratio = V100.flops_per_s["float32"] / device("t4").flops_per_s["float32"]
    here, there = workloads["vgg19"], slower["vgg19"]
    assert there.active_ms(8, 0.5) == pytest.approx(ratio * here.active_ms(8, 0.5))
    assert there.power_w(8, 0.5) / t4.max_power_w == pytest.approx(here.power_w(8, 0.5) / v100.max_power_w)
    assert there.l2_pct(8, 0.5) == pytest.approx(here.l2_pct(8, 0.5))
    assert there.load_bytes == here.load_bytes


def test_the_coefficients_of_the_t4_stand_beside_the_imported_profile(tmp_path: Path) -> None:
    folder = write_igniter(tmp_path / "data")
    estimator = make_estimator("igniter", KernelDb(build_database("igniter", tmp_path / "work", folder)))
    times = [estimator.estimate("ssd", device(kind), 4, Share(50.0)).latency_ms.value for kind in ("v100", "t4")]
    assert times[0] < times[1]


def test_copies_of_a_service_run_its_model(tmp_path: Path) -> None:
    folder = write_parvagpu(tmp_path)
    assert [demand.model for demand in parvagpu_demands(folder, 1, 2)] == ["a", "b", "a#1", "b#1"]
    workloads = listed_demands("igniter", "W12", 2)
    assert len(workloads) == 24 and workloads[12].model == "W1#1" and workloads[12].source_model == "alexnet"
    assert sum(demand.rate_rps for demand in usher_demands(1000.0)) == pytest.approx(1000.0)


def describe_source(folder: Path, monkeypatch: pytest.MonkeyPatch, digest: str) -> None:
    """Let iGniter's profile be published in ``folder``, with this SHA-256."""
    (folder / "papers").mkdir(parents=True)
    (folder / "papers" / "published.toml").write_text(
        f'''[igniter_v100]
what = "config"
repository = "the authors' repository"
raw = "{folder.as_uri()}"
renamed = {{config = "config.jsonl"}}
files = {{"algorithm/config" = "{digest}"}}
'''
    )
    monkeypatch.setattr("gpuprof.lab.scenarios.datasets", lambda: folder)


def test_published_data_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = tmp_path / "repository" / "algorithm" / "config"
    published.parent.mkdir(parents=True)
    published.write_bytes(b"{}")
    describe_source(tmp_path / "repository", monkeypatch, hashlib.sha256(b"{}").hexdigest())
    folder = find_published(tmp_path / "data", "igniter_v100")
    assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [("config.jsonl", b"{}")]
    published.unlink()
    assert find_published(tmp_path / "data", "igniter_v100") == folder


def test_data_that_cannot_be_fetched_or_are_others_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe_source(tmp_path / "repository", monkeypatch, "0" * 64)
    with pytest.raises(InputError, match=r"authors' repository.*GPUPROF_LAB_DATA"):
        find_published(tmp_path / "data", "igniter_v100")
    (tmp_path / "repository" / "algorithm").mkdir()
    (tmp_path / "repository" / "algorithm" / "config").write_bytes(b"{}")
    with pytest.raises(InputError, match="not the published file"):
        find_published(tmp_path / "data", "igniter_v100")
    assert list((tmp_path / "data").iterdir()) == []
