"""Standbys with a larger share, and when they take over."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.target import Target
from gpuprof.rules.cpu_slices import CpuSlice
from gpuprof.serving.machine.orders import GpuShare, WorkerOrder
from gpuprof.serving.plan.serving_plan import SpareResources, Standby
from gpuprof.serving.router.served_replica import ReplicaPlan
from gpuprof.serving.router.worker import SIMULATED_PROVIDER
from tests.reruns import serves_in_real_time
from tests.serving.running import map_of, replica, running, send_until
from tests.serving.test_apply import apply
from tests.serving.test_reliability import Askers, figure

pytestmark = serves_in_real_time


def plan_standby(share_pct: float, order: WorkerOrder, shares: list[float], cores: int = 4) -> Standby | None:
    placed = [("n/d:0", "", share, 0) for share in (share_pct, *shares)]
    plan = ReplicaPlan("m/0", 1, 0.0, (10.0,), place="n/d:0", share_pct=share_pct)
    return SpareResources(placed, tuple(range(cores))).standby(plan, order, 1, 10.0)


def on_cores(part: CpuSlice) -> WorkerOrder:
    return WorkerOrder("m", "1", "null:4", 1, cores=part.cores, quota_cores=part.quota_cores, threads=part.threads)


def test_a_standby_has_ten_percent_more_of_the_cpu_first_of_its_own_cores() -> None:
    standby = plan_standby(20.0, on_cores(CpuSlice((0,), 0.8)), [])  # of 4 cores
    assert standby is not None and standby.plan.share_pct == 30.0
    (order,) = standby.orders
    assert order.cores[0] == 0 and len(order.cores) == 2
    assert order.quota_cores == pytest.approx(1.2)
    assert order.threads == 2
    amounts = {claim.resource: claim.amount for claim in standby.claims}
    assert amounts["core 0"] == pytest.approx(0.2)
    assert sum(amounts.values()) == pytest.approx(0.4)


def test_a_standby_that_fills_its_cores_needs_no_quota() -> None:
    standby = plan_standby(40.0, on_cores(CpuSlice((1,), 0.8)), [50.0], cores=2)  # the other has core 0
    assert standby is not None
    assert (standby.orders[0].cores, standby.orders[0].quota_cores) == ((1,), None)


def test_a_standby_has_what_is_left_and_there_is_none_where_nothing_is_left() -> None:
    gpu = WorkerOrder("m", "1", "m.onnx", 1, gpu=GpuShare("GPU-1", 60.0), with_mps=True)
    standby = plan_standby(60.0, gpu, [34.0])
    assert standby is not None and standby.orders[0].gpu == GpuShare("GPU-1", 66.0)
    assert plan_standby(60.0, gpu, [40.0]) is None


def test_a_simulated_standby_is_faster_in_proportion() -> None:
    order = WorkerOrder("m", "1", "", 1, provider=SIMULATED_PROVIDER, latency_ms=(10.0,))
    standby = plan_standby(40.0, order, [])
    assert standby is not None and standby.orders[0].latency_ms == (8.0,) == standby.plan.latency_ms


def decisions(text: str, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if event in line["event"]]


@pytest.mark.slow
def test_a_standby_takes_over_from_a_replica_that_is_too_slow_for_its_load(tmp_path: Path) -> None:
    slo_ms = 320.0
    document = map_of({"m": "null:4"}, [replica("m", latency_ms=40.0, sm_share_pct=40.0)], slo_ms)
    with running(tmp_path, document, "--simulate", "--shadow", "--log", "json") as server:
        assert "2 workers" in server.line
        stream = RequestStream("m", 28.0, slo_ms)  # of 25, then 31, that it can serve
        results = send_until(lambda rows: rows[0].in_slo >= 0.95 * rows[0].sent, server, [stream])
        _, errors = server.stop()
    (decision,) = decisions(errors, "standby takes over")
    assert (decision["model"], decision["replica"]) == ("m", "m/0")
    assert (decision["share_pct"], decision["new_share_pct"]) == (40.0, 50.0)
    assert decision["late"] + decision["refused"] > 0
    assert all(result.lost == result.failed == 0 for result in results)
    assert results[-1].in_slo >= 0.95 * results[-1].sent


@pytest.mark.slow
def test_an_applied_map_brings_back_its_shares_and_standby(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo_ms = 320.0
    document = map_of({"m": "null:4"}, [replica("m", latency_ms=40.0, sm_share_pct=40.0)], slo_ms)
    with running(tmp_path, document, "--simulate", "--shadow", "--log", "json") as server:

        def standby_serves(_: object = None) -> bool:
            return figure(server, "gpuprof_replica_share_ratio") == 0.5

        send_until(standby_serves, server, [RequestStream("m", 28.0, slo_ms)])
        assert standby_serves()
        with Askers(server, "m", 1, [0.0]) as askers:
            assert apply(server, tmp_path / "again.json", document) == 0
        changes = {row["replica"]: row["change"] for row in json.loads(capsys.readouterr().out)}
        assert changes == {"m/0": "started", "m/0-shadow": "stopped"}
        assert figure(server, "gpuprof_replica_share_ratio") == 0.4
        assert askers.lost == askers.wrong == []
        send_until(standby_serves, server, [RequestStream("m", 28.0, slo_ms)])
        assert standby_serves()  # there was a standby again
        _, errors = server.stop()
    assert len(decisions(errors, "standby takes over")) == 2


def test_a_model_that_keeps_its_slo_keeps_its_worker(tmp_path: Path) -> None:
    document = map_of({"m": "null:4"}, [replica("m", latency_ms=2.0, sm_share_pct=40.0)], slo_ms=500.0)
    with running(tmp_path, document, "--simulate", "--shadow", "--log", "json") as server:
        run_load(Target.parse(server.url), [RequestStream("m", 50.0, 500.0)], LoadSettings(2.5, 0.0, clients=1))
        _, errors = server.stop()
    assert decisions(errors, "takes over") == []
