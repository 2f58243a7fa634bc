from __future__ import annotations

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.machine.cgroup import own_cores
from gpuprof.pipeline.load import worker_cores
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
