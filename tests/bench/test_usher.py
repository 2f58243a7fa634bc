"""The reproductions of USHER's figures, scaled far down."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.reproduce import (
    stand_in_db,
    usher_fig6,
    usher_fig15,
    usher_fig18,
    usher_fig21,
    usher_fig22,
    usher_fig24,
    usher_fig25,
)
from bench.reproduce.reproduction import Reproduction
from bench.reproduce.usher_runs import BASELINES, USHERS, decide_one, demands, schedulers, why
from bench.v100_profiles import v100_profiles
from gpuprof.cli.main import main
from gpuprof.domain.arrival_process import RecordedArrivals
from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.estimators.builtin import make_estimator
from gpuprof.kernel_db.store import KernelDb

NOWHERE = Path("nowhere")


def numbers(found: Reproduction) -> dict[str, float]:
    """Return the first number of each row."""
    return {str(row[0]): cell for row in found.rows if isinstance(cell := row[1], float)}


def test_the_models_share_the_load_and_the_scale_divides_it() -> None:
    whole, part = demands(15e6, 1.0), demands(15e6, 100.0)
    assert sum(demand.rate_rps for demand in whole) == pytest.approx(15e6)
    assert sum(demand.rate_rps for demand in part) == pytest.approx(15e4)
    assert "1/50 of the paper's" in why(50.0)[-1]


def test_whole_gpus_are_not_shared(tmp_path: Path) -> None:
    deployment = decide_one(schedulers()["whole GPUs"], demands(6e6, 400.0), ("v100",), work=tmp_path).deployment
    assert all(len(part.replicas) == 1 and replica.sm_share_pct == 100 for _, _, part, replica in deployment.places())


@pytest.mark.slow
def test_figure_18_by_weighted_occupancy_usher_takes_fewest_gpus_and_by_the_highest_no_fewer_than_whole_ones(
    tmp_path: Path,
) -> None:
    found = usher_fig18.compute(NOWHERE, (6e6,), 400.0, tmp_path)
    gpus = numbers(found)
    assert found.sound
    assert list(gpus) == list(schedulers())
    assert gpus["usher by WAO"] < gpus["optimal"] < gpus["whole GPUs"] <= gpus["usher"]
    fact = next(fact for fact in found.facts if fact.what == "usher by WAO better than whole GPUs, times")
    assert fact.ours == pytest.approx(gpus["whole GPUs"] / gpus["usher by WAO"])
    assert len(found.facts) == len(USHERS) * len(BASELINES)


@pytest.mark.slow
def test_figure_15_serves_no_more_than_comes_and_more_on_more_gpus(tmp_path: Path) -> None:
    found = usher_fig15.compute(NOWHERE, (2000, 6000), 400.0, tmp_path)
    assert found.sound
    for _name, few, many in found.rows:
        assert isinstance(few, float)
        assert isinstance(many, float)
        assert 0.0 <= few <= many <= 15.0 + 1e-6


@pytest.mark.slow
def test_figure_21_costs_least_where_kinds_and_shares_are_chosen_together(tmp_path: Path) -> None:
    found = usher_fig21.compute(NOWHERE, (5e6,), 500.0, tmp_path)
    costs = numbers(found)
    assert found.sound
    assert min(costs.values()) == costs["optimal"]


def test_figure_24_the_load_surges_for_all_models_together() -> None:
    load = usher_fig24.surging({"a": 0.75, "b": 0.25}, 1000.0, 600.0)
    counts = []
    for process in load.values():
        assert isinstance(process, RecordedArrivals)
        assert (np.diff(process.times) >= 0).all()
        counts.append(np.histogram(process.times / 1e9, bins=20, range=(0.0, 600.0))[0])
    assert np.corrcoef(counts)[0, 1] > 0.95
    assert counts[0].max() > 1.5 * counts[0].min()


@pytest.mark.slow
def test_figure_24_follows_the_load_and_counts_what_was_started(tmp_path: Path) -> None:
    found = usher_fig24.compute(NOWHERE, 90.0, 1500.0, tmp_path)
    gpus = numbers(found)
    assert list(gpus) == list(schedulers())
    assert gpus["usher by WAO"] < gpus["usher"]
    for row in found.rows:
        _name, mean, most, maps, started, in_time, _wait = row
        assert isinstance(mean, float)
        assert isinstance(most, float)
        assert isinstance(in_time, float)
        assert mean <= most
        assert maps is not None
        assert started is not None
        assert 0.0 <= in_time <= 100.0


def test_figure_6a_every_model_of_the_thesis_requires_more_compute_than_memory() -> None:
    found = usher_fig6.compute(NOWHERE)
    assert len(found.rows) == 13
    for row in found.rows:
        mreq, *creq = (cell for cell in row[1:] if isinstance(cell, float))
        assert len(creq) == 3 and 0.0 < mreq < min(creq) <= max(creq) <= 100.0
    # the thesis, Table A.1: AlexNet at its six batches
    alexnet = [one for one in v100_profiles().rows if one.model == "alexnet"]
    assert found.row("alexnet")[0] == pytest.approx(sum(one.memory_pct or 0.0 for one in alexnet) / 6, rel=1e-3)


@pytest.mark.slow
def test_figures_22_and_23_a_looser_slo_never_costs_goodput_where_it_is_planned_for(tmp_path: Path) -> None:
    found = usher_fig22.compute(NOWHERE, (0.75, 2.0), 1000.0, 4000, tmp_path)
    assert found.sound and [str(row[0]) for row in found.rows] == list(schedulers())
    for name in ("whole GPUs", "optimal"):
        tight, loose = found.row(name)
        assert isinstance(tight, float) and isinstance(loose, float)
        assert 0.0 < tight <= loose * (1.0 + 1e-9) and loose <= 15.0 + 1e-6


def test_figure_25_has_usher_itself_beside_what_it_is_without_its_parts(tmp_path: Path) -> None:
    found = usher_fig25.compute(NOWHERE, (6e6,), 1000.0, tmp_path)
    gpus = numbers(found)
    assert found.sound and len(gpus) == 8
    for name, scheduler in (("usher by max-occupancy", "usher"), ("usher by wao", "usher by WAO")):
        alone = decide_one(schedulers()[scheduler], demands(6e6, 1000.0), ("v100",), work=tmp_path)
        assert gpus[name] == 1000.0 * alone.gpus


def test_the_printed_commands_are_what_was_run(tmp_path: Path) -> None:
    """Typed again, the commands write the same replicas."""
    found = usher_fig25.compute(NOWHERE, (6e6,), 1000.0, tmp_path)
    databases, places = found.commands[:2], found.commands[2:]
    assert len(places) == 8 and all(line.startswith("gpuprof place ") for line in places)
    words = shlex.split(places[0])
    written = Path(words[words.index("-o") + 1])
    before = json.loads(written.read_text(encoding="utf-8"))
    written.unlink()
    shutil.rmtree(tmp_path / "usher-whole-db")
    stand_in = shlex.split(databases[0])
    assert stand_in[:3] == ["python", "-m", "bench.reproduce.stand_in_db"]
    assert stand_in_db.main(stand_in[3:]) == 0
    assert main(words[1:]) == 0
    after = json.loads(written.read_text(encoding="utf-8"))
    assert after["nodes"] == before["nodes"] and after["predicted"] == before["predicted"]


def test_a_stand_in_stretches_time_by_the_sms_that_a_share_lacks(tmp_path: Path) -> None:
    """bert at batch 4 keeps 96.82% of a V100 busy (Table A.1): under 40% it takes 96.82 / 40 times as long."""
    estimator = make_estimator("usher", KernelDb(stand_in_db.write_stand_ins(tmp_path / "db", ("v100", "h100"), 10.0)))
    v100, h100 = device("v100"), device("h100")
    alone = estimator.estimate("bert", v100, 4, Share()).latency_ms.value
    assert estimator.estimate("bert", v100, 4, Share(40.0)).latency_ms.value == pytest.approx(alone * 96.82 / 40.0)
    ratio = v100.flops_per_s["float32"] / h100.flops_per_s["float32"]
    assert estimator.estimate("bert", h100, 4, Share()).latency_ms.value == pytest.approx(ratio * alone)
    assert estimator.shares("bert", v100) == tuple(Share(10.0 * number) for number in range(1, 11))
