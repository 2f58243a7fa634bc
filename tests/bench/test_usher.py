"""The reproductions of USHER's figures, scaled far down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.reproduce import usher_fig6, usher_fig15, usher_fig18, usher_fig21, usher_fig22, usher_fig24, usher_fig25
from bench.reproduce.reproduction import Reproduction
from bench.reproduce.usher_runs import BASELINES, USHERS, decide, decide_one, demands, schedulers, why
from gpuprof.domain.arrival_process import RecordedArrivals
from gpuprof.domain.catalogue import v100_profiles

NOWHERE = Path("nowhere")


def numbers(found: Reproduction) -> dict[str, float]:
    """Return the first number of each row."""
    return {str(row[0]): cell for row in found.rows if isinstance(cell := row[1], float)}


def test_the_models_share_the_load_and_the_scale_divides_it() -> None:
    whole, part = demands(15e6, 1.0), demands(15e6, 100.0)
    assert sum(demand.rate_rps for demand in whole) == pytest.approx(15e6)
    assert sum(demand.rate_rps for demand in part) == pytest.approx(15e4)
    assert "1/50 of the paper's" in why(50.0)[-1]


def test_whole_gpus_are_not_shared() -> None:
    runs = decide(demands(6e6, 400.0), ("v100",))
    deployment = runs["whole GPUs"].deployment
    assert deployment is not None
    assert all(len(part.replicas) == 1 and replica.sm_share_pct == 100 for _, _, part, replica in deployment.places())


@pytest.mark.slow
def test_figure_18_by_weighted_occupancy_usher_takes_fewest_gpus_and_by_the_highest_no_fewer_than_whole_ones() -> None:
    found = usher_fig18.compute(NOWHERE, (6e6,), 400.0)
    gpus = numbers(found)
    assert found.sound
    assert list(gpus) == list(schedulers())
    assert gpus["usher by WAO"] < gpus["optimal"] < gpus["whole GPUs"] <= gpus["usher"]
    fact = next(fact for fact in found.facts if fact.what == "usher by WAO better than whole GPUs, times")
    assert fact.ours == pytest.approx(gpus["whole GPUs"] / gpus["usher by WAO"])
    assert len(found.facts) == len(USHERS) * len(BASELINES)


@pytest.mark.slow
def test_figure_15_serves_no_more_than_comes_and_more_on_more_gpus() -> None:
    found = usher_fig15.compute(NOWHERE, (2000, 6000), 400.0)
    assert found.sound
    for _name, few, many in found.rows:
        assert isinstance(few, float)
        assert isinstance(many, float)
        assert 0.0 <= few <= many <= 15.0 + 1e-6


@pytest.mark.slow
def test_figure_21_costs_least_where_kinds_and_shares_are_chosen_together() -> None:
    found = usher_fig21.compute(NOWHERE, (5e6,), 500.0)
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
def test_figure_24_follows_the_load_and_counts_what_was_started() -> None:
    found = usher_fig24.compute(NOWHERE, 90.0, 1500.0)
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
def test_figures_22_and_23_a_looser_slo_never_costs_goodput_where_it_is_planned_for() -> None:
    found = usher_fig22.compute(NOWHERE, (0.75, 2.0), 1000.0, 4000)
    assert found.sound and [str(row[0]) for row in found.rows] == list(schedulers())
    for name in ("whole GPUs", "optimal"):
        tight, loose = found.row(name)
        assert isinstance(tight, float) and isinstance(loose, float)
        assert 0.0 < tight <= loose * (1.0 + 1e-9) and loose <= 15.0 + 1e-6


def test_figure_25_has_usher_itself_beside_what_it_is_without_its_parts() -> None:
    found = usher_fig25.compute(NOWHERE, (6e6,), 1000.0)
    gpus = numbers(found)
    assert found.sound and len(gpus) == 8
    for name, scheduler in (("usher by max-occupancy", "usher"), ("usher by wao", "usher by WAO")):
        alone = decide_one(scheduler, schedulers()[scheduler], demands(6e6, 1000.0), ("v100",))
        assert alone.objective is not None and gpus[name] == 1000.0 * alone.objective.gpus
