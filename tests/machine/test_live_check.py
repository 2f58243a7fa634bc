"""Differences between a map and the machine, on played machines."""

from dataclasses import replace

from gpuprof.domain.catalogue import devices
from gpuprof.domain.deployment import Gpu, MigInstance, Node, Partition, Replica, ReplicaPrediction
from gpuprof.errors import UnavailableError
from gpuprof.machine.gpu_share import LiveMachine, MigLayout, find_live_faults

A100 = devices()["a100-80"]


def _replica(share_pct: float) -> Replica:
    return Replica(
        model="m",
        batch=1,
        processes=1,
        sm_share_pct=share_pct,
        rate_rps=1.0,
        predicted=ReplicaPrediction(latency_ms=1.0, throughput_rps=1.0, goodput_rps=1.0, source="measured"),
    )


def _node(*partitions: Partition, index: int = 0) -> Node:
    return Node(name="node0", gpus=(Gpu(index=index, device="a100-80", partitions=partitions),))


SHARED = _node(Partition(mig=None, replicas=(_replica(25.0), _replica(50.0))))
CUT = _node(Partition(mig=MigInstance(profile="3g.40gb", start=4), replicas=(_replica(100.0),)))


def _machine(layout: MigLayout | None = None, all_sms: bool = False, gpu: str = "a100-80") -> LiveMachine:
    def granted(_: int, percentage: float) -> int:
        return A100.compute_units if all_sms else round(percentage / 100.0 * A100.compute_units)

    return LiveMachine(lambda: (devices()[gpu],), lambda _: layout or MigLayout(False), granted, "/tmp/pipe")


def _faults(node: Node, machine: LiveMachine) -> list[str]:
    return [message for _, message in find_live_faults(node, machine)]


def test_a_machine_as_planned_has_no_faults() -> None:
    assert _faults(SHARED, _machine()) == []
    assert _faults(CUT, _machine(MigLayout.of([("3g.40gb", 4)]))) == []


def test_clients_that_find_no_daemon_and_get_the_whole_gpu_are_found() -> None:
    (quarter, half) = _faults(SHARED, _machine(all_sms=True))
    assert "a client at 25% gets all 108 SMs: no MPS daemon answers at /tmp/pipe" in quarter
    assert "a client at 50%" in half


def test_a_client_with_a_larger_share_than_its_own_is_found() -> None:
    (fault,) = _faults(SHARED, replace(_machine(), granted_sms=lambda *_: 40))
    assert fault == "a client at 25% gets 40 SMs, and its share is 27"


def test_another_mig_layout_and_a_gpu_without_instances_are_found() -> None:
    assert "no MIG, and the map plans 3g.40gb at 4" in _faults(CUT, _machine())[0]
    assert "1g.10gb at 0, and the map plans no MIG" in _faults(SHARED, _machine(MigLayout.of([("1g.10gb", 0)])))[0]


def test_a_profile_under_another_drivers_name_is_found() -> None:
    named = replace(A100, mig_profiles=tuple(profile for profile in A100.mig_profiles if profile.name != "3g.40gb"))
    machine = replace(_machine(MigLayout.of([("3g.39gb", 4)])), gpus=lambda: (named,))
    assert "the driver offers no MIG profile 3g.40gb; it offers" in _faults(CUT, machine)[0]


def test_another_gpu_a_missing_gpu_and_a_tool_that_fails_are_found() -> None:
    def fail(_: int) -> MigLayout:
        raise UnavailableError("nvidia-smi is not installed")

    assert _faults(SHARED, _machine(gpu="v100")) == ["the GPU is a v100, and the map plans a a100-80"]
    far = _node(Partition(mig=None, replicas=(_replica(25.0),)), index=3)
    assert _faults(far, _machine()) == ["this machine has 1 NVIDIA GPU, and the map plans a a100-80"]
    assert "nvidia-smi is not installed" in _faults(CUT, replace(_machine(), layout=fail))[0]
