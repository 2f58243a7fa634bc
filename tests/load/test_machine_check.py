from __future__ import annotations

import pytest

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.load import machine_check
from gpuprof.load.load import LoadOutcome, RequestStream
from gpuprof.load.machine_check import MachineCheck, check_machine, expected_ms, is_local, worker_cores
from gpuprof.load.target import Target
from gpuprof.machine.cpu_share import own_cores
from gpuprof.machine.lost_time import StolenTime
from tests.simulator.maps import make_map, replica


def one_cpu(*shares_pct: float) -> DeploymentMap:
    parts = [replica(f"m{i}", [10.0]).model_copy(update={"sm_share_pct": pct}) for i, pct in enumerate(shares_pct)]
    whole = make_map([parts])
    (node,) = whole.nodes
    cpu = node.gpus[0].model_copy(update={"device": "cpu-some-machine"})
    return whole.model_copy(update={"nodes": (node.model_copy(update={"gpus": (cpu,)}),)})


def test_the_workers_cores_are_those_that_the_server_gives_them() -> None:
    cores = own_cores()
    share = 100.0 / len(cores)
    assert worker_cores(one_cpu(share)) == {cores[0]}
    assert worker_cores(one_cpu(100.0)) == set(cores)
    assert worker_cores(one_cpu(80.0, 80.0)) == frozenset()
    assert worker_cores(make_map([[replica("m", [10.0])]])) == frozenset()  # a GPU


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("192.0.2.7", False)]
)
def test_only_a_loopback_address_is_this_machine_s(host: str, local: bool) -> None:
    assert is_local(host) is local


def test_a_machine_that_is_slower_than_its_profile_or_busy_is_told_of() -> None:
    slow, busy = MachineCheck(1.4, {"a": 1.3, "b": 1.02}).notes(), MachineCheck(0.1, {"a": 0.8}).notes()
    first, second = slow
    assert "1.4 of this machine's" in first
    assert second.startswith("a: a batch of one takes 30% longer than when it was profiled")
    (third,) = busy
    assert "takes 20% less than when it was profiled" in third
    assert not list(MachineCheck(None, {"a": 0.95}).notes())


def test_a_machine_that_wakes_up_late_or_whose_hypervisor_takes_time_is_told_of() -> None:
    late, stolen = MachineCheck(0.0, {}, 10.5, 0.018).notes()
    assert late.startswith("1% of the wake-ups on this machine are 10.5 ms late or more")
    assert stolen.startswith("before anything was sent, the hypervisor gave 1.8% of this machine's time to others")
    assert not list(MachineCheck(0.0, {}, 0.3, 0.002).notes())


def test_the_time_of_a_batch_is_compared_with_the_map_s_after_a_pause_and_without_the_handover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = one_cpu(20.0, 20.0)
    assert expected_ms(whole, "m0", 0.5) == 9.5
    assert expected_ms(whole, "unknown", 0.5) is None
    seen: list[str] = []

    def run(target: Target, streams: list[RequestStream], settings: object) -> LoadOutcome:
        seen.append(streams[0].model)
        batches = {1: 50} if streams[0].model == "m0" else {1: 20, 2: 10}
        return LoadOutcome([], [{"model": streams[0].model, "infer_ms": 12.0, "batches": batches}], 1)

    monkeypatch.setattr(machine_check, "run_load", run)
    monkeypatch.setattr(machine_check, "busy_cores", lambda seconds, cores: 0.3)
    monkeypatch.setattr(machine_check, "measure_lateness", lambda seconds: 1.5)
    monkeypatch.setattr(StolenTime, "part", lambda self: 0.02)
    streams = [RequestStream(name, 10.0, 100.0) for name in ("m0", "m1", "m2")]
    found = check_machine(Target("127.0.0.1", 1), streams[:2], whole)
    assert seen == ["m0", "m1"]
    assert found == MachineCheck(0.3, {"m0": 1.2}, 1.5, 0.02)  # where requests shared batches nothing is known
