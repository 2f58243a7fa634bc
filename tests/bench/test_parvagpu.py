"""The reproductions of ParvaGPU's figures, on small profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.parvagpu_profiles import read_latencies
from bench.reproduce import (
    parvagpu_fig3,
    parvagpu_fig5,
    parvagpu_fig6,
    parvagpu_fig7,
    parvagpu_fig8,
    parvagpu_fig9,
    parvagpu_fig10,
)
from bench.reproduce.parvagpu_runs import POLICIES, fragmentation, gpus, saved_pct, scenarios, slack
from bench.reproduce.stand_in_db import estimate_mps
from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from tests.bench.published import write_parvagpu

A100 = device("a100-80")


@pytest.fixture(autouse=True)
def work_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # demands are written where the reproductions are started


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parvagpu(tmp_path_factory.mktemp("reference"))


def test_an_mps_share_runs_as_its_part_of_the_instances(reference: Path) -> None:
    stand_in = estimate_mps(reference / "parvagpu_a100")

    def rate(pct: float, batch: int = 4) -> float:
        return 1000.0 * batch / stand_in.estimate("a", A100, batch, Share(pct)).latency_ms.value

    assert rate(100.0) == pytest.approx(640.0)
    assert rate(42.5) == pytest.approx(287.75)  # 2.975 slices, on the line from two to three
    assert rate(77.5) == pytest.approx(503.5)  # 5.425, from four to seven
    assert rate(7.5) == pytest.approx(52.5)
    assert stand_in.estimate("a", A100, 2, Share()).latency_ms.value == pytest.approx(1000.0 * 2.0 / 640.0)


@pytest.mark.parametrize(
    ("batch", "share", "processes"), [(8, Share(), 1), (1, Share(), 2), (1, Share(100, "1g.10gb"), 1)]
)
def test_what_mps_shares_cannot_be_told_of_is_refused(
    reference: Path, batch: int, share: Share, processes: int
) -> None:
    with pytest.raises(InputError, match="a"):
        estimate_mps(reference / "parvagpu_a100").estimate("a", A100, batch, share, (), processes)


def test_gpus_slack_and_fragmentation_are_those_of_the_maps(reference: Path) -> None:
    run = scenarios(reference, (1,))[0]
    # 700/s and 120/s: two processes of a slice reach 120/s, of seven 700/s, of four 420/s: six slices and one in all
    parva = run["parvagpu"]
    assert gpus(parva) == 1
    assert parva.objective is not None
    assert fragmentation(parva) == pytest.approx(0.0)
    full = parvagpu_fig6.saturation(read_latencies(reference / "parvagpu_a100"))
    assert full.most_rps["a", 7.0] == 700.0
    assert slack(parva, lambda _, replica: 1.0) == pytest.approx(parva.objective.internal_slack)
    assert slack(parva, lambda _, replica: 0.5) == pytest.approx(1 - 0.5 * (1 - parva.objective.internal_slack))
    assert saved_pct([run], "parvagpu") == 0.0


def test_figure_5_has_a_row_for_each_policy_and_nobody_is_below_the_bound(reference: Path) -> None:
    found = parvagpu_fig5.compute(reference, (1,))
    assert found.sound
    assert found.column("policy") == (*POLICIES, "bound for any map")
    bound = found.row("bound for any map")[0]
    assert isinstance(bound, float | int)
    assert all(isinstance(cell, float | int) and cell >= bound for name in POLICIES for cell in found.row(name)[:1])


def test_figure_6_has_less_slack_in_shares_that_are_always_busy(reference: Path) -> None:
    found = parvagpu_fig6.compute(reference, (1,))
    for name in POLICIES:
        asked, busy = found.row(f"{name}, at the asked rates")[0], found.row(f"{name}, always busy")[0]
        assert isinstance(asked, float)
        assert isinstance(busy, float)
        assert -1e-9 <= busy <= asked + 1e-9 <= 100.0


def test_figure_7_is_between_nothing_and_everything(reference: Path) -> None:
    found = parvagpu_fig7.compute(reference, (1,))
    assert all(isinstance(cell, float) and 0.0 <= cell < 100.0 for cell in found.column("S1"))


def test_figure_10_multiplies_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parvagpu_fig10, "_SCENARIO", 1)
    found = parvagpu_fig10.compute(write_parvagpu(tmp_path, rates=(690.0, 680.0)), (1, 3))
    assert found.row("parvagpu") == (2, 6)
    assert found.row("optimal") == (2, 6)


def test_figures_3_and_4_are_the_published_table(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parvagpu_fig3, "MODEL", "a")
    found = parvagpu_fig3.compute(reference)
    # One process in two slices: 200/s whatever the batch; two of 110/s each.
    first, second, third = found.row("requests/s, 1 processes, 2 slices")[:3]
    assert (first, third) == pytest.approx((200.0, 200.0))
    assert second is None
    assert found.row("requests/s, 2 processes, 2 slices")[0] == pytest.approx(220.0)
    assert found.row("ms, 2 processes, 2 slices")[2] == pytest.approx(4000.0 / 110.0)


def test_figure_8_counts_who_is_late_and_says_nothing_of_maps_that_do_not_serve_all(reference: Path) -> None:
    found = parvagpu_fig8.compute(reference, (1,))
    assert found.sound
    assert found.row("parvagpu")[0] == pytest.approx(100.0)
    slow = {one: 20.0 * ms for one, ms in read_latencies(reference / "parvagpu_a100").items()}
    deployment = scenarios(reference, (1,))[0]["parvagpu"].deployment
    assert deployment is not None
    assert all(
        replica.batch_latency_ms is not None and len(replica.batch_latency_ms) == replica.batch
        for *_, replica in parvagpu_fig8.with_times(deployment, slow).places()
    )


def test_figures_9_and_11_have_a_time_for_each_policy(reference: Path) -> None:
    found = parvagpu_fig9.compute(reference, (1,), (1, 2))
    assert found.header == ("policy", "S1", "S1 ×1", "S1 ×2")
    assert found.column("policy") == POLICIES
    assert all(isinstance(cell, float) and cell > 0.0 for row in found.rows for cell in row[1:])
