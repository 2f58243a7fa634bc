"""Serving on the nodes of a Ray cluster."""

from __future__ import annotations

import importlib.util
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme

from gpuprof.serving.ray_machine import placement
from tests.serving.ray_cluster import RayCluster, ray_cluster
from tests.serving.running import RunningServer, eventually, map_of, replica, running
from tests.serving.test_reliability import Askers, figure

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: .[ray]")


def two_nodes() -> dict[str, Any]:
    document = map_of({"m": "null:4", "large": "null:600k"}, [replica("m"), replica("large")], slo_ms=20_000.0)
    document["nodes"] = [{**document["nodes"][0], "name": name} for name in ("one", "two")]
    return document


def ray_node(*resources: str, alive: bool = True, labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {"Alive": alive, "Resources": dict.fromkeys(resources, 1.0), "Labels": labels or {}}


def test_a_node_of_the_map_is_the_ray_node_that_has_its_name_or_one_that_stands_in() -> None:
    nodes = [ray_node("gpuprof:one"), ray_node("gpuprof:two", alive=False), ray_node(labels={"gpuprof.node": "three"})]
    assert placement("one", nodes) == {"resources": {"gpuprof:one": 1}}
    assert placement("two", nodes) is None
    assert placement("three", nodes) == {"label_selector": {"gpuprof.node": "three"}}
    assert placement("two", [*nodes, ray_node("gpuprof")]) == {"resources": {"gpuprof": 1}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster("gpuprof:one", "gpuprof:two") as started:
        yield started


@needs_ray
@pytest.mark.slow
def test_a_map_of_two_nodes_is_served_and_a_node_that_dies_loses_no_accepted_request(
    tmp_path: Path, cluster: RayCluster
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(chain)
    certificate.private_key_pem.write_to_path(key)
    options = ["--engine", "ray", "--ray-address", cluster.address, "--tls-cert", str(chain), "--tls-key", str(key)]
    with running(tmp_path, two_nodes(), *options) as server:
        server.context = ssl.create_default_context()
        authority.configure_trust(server.context)
        assert figure(server, "gpuprof_workers_ready") == 4
        values = [float(number) for number in range(150_000)]
        assert server.infer("large", values)[1]["outputs"][0]["data"] == values
        with Askers(server, "m", 2) as askers:
            _kill_node(cluster, server)
            assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 2)
            asked = len(askers.statuses)
            assert eventually(lambda: len(askers.statuses) > asked + 20)
        cluster.do("add gpuprof:two")
        assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 4, limit_s=100.0)
        assert askers.wrong == askers.lost == []
        assert set(askers.statuses) == {200}
        _lose_touch_with_ray(server)
        code, errors = server.stop()
        assert code == 0 and errors.endswith("drained\n")


def _lose_touch_with_ray(server: RunningServer) -> None:
    """Kill the process that speaks with Ray, with which Ray ends the machines: all of it comes back."""
    before = _machines()
    (keeper,) = psutil.Process(server.process.pid).children()
    keeper.kill()
    assert eventually(lambda: len(_machines() - before) == 2, limit_s=60.0)
    assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 4, limit_s=60.0)
    assert server.infer("m", [7.0])[0] == 200


def _machines() -> set[int]:
    return {one.pid for one in psutil.process_iter(["cmdline"]) if _is_worker(one, "ray::RayMachine.serve")}


def _kill_node(cluster: RayCluster, server: RunningServer) -> None:
    """Kill the workers and the machine of the second node, as the end of a machine does, and Ray's node itself."""
    workers = [one for one in psutil.process_iter(["cmdline"]) if _is_worker(one, "worker:two/")]
    (nursery,) = {psutil.Process(worker.ppid()) for worker in workers}
    for process in (psutil.Process(nursery.ppid()), nursery, *workers):
        process.kill()
    cluster.do("remove 1")


def _is_worker(process: psutil.Process, number: str) -> bool:
    return any(word.startswith(number) for word in process.info["cmdline"] or ())


@needs_ray
@pytest.mark.slow
def test_a_node_that_the_cluster_lacks_is_named(tmp_path: Path, cluster: RayCluster) -> None:
    document = two_nodes()
    document["nodes"][0]["name"] = "elsewhere"
    with (
        pytest.raises(AssertionError, match=r"no node for 'elsewhere' of the map .*ray start --resources"),
        running(tmp_path, document, "--engine", "ray", "--ray-address", cluster.address, "--insecure"),
    ):
        pass


@needs_ray
def test_without_a_cluster_it_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"),
        running(tmp_path, two_nodes(), "--engine", "ray", "--ray-address", "127.0.0.1:1"),
    ):
        pass
