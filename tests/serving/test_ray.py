"""Serving on the nodes of a Ray cluster."""

import importlib.util
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme

from gpuprof.cli.main import main
from gpuprof.domain.deployment import read_map
from gpuprof.load.load import RequestStream
from gpuprof.load.target import Target
from gpuprof.machine.cpu import local_cpu
from tests.estimators.rows import database, measured_row
from tests.reruns import serves_in_real_time
from tests.serving.change.test_adapt import Loaded
from tests.serving.change.test_shadow import decisions
from tests.serving.ray_cluster import RayCluster, ray_cluster
from tests.serving.running import RunningServer, eventually, map_of, replica, running
from tests.serving.test_apply import apply
from tests.serving.test_reliability import Askers, figure

pytestmark = serves_in_real_time

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: .[ray]")


def two_nodes() -> dict[str, Any]:
    document = map_of({"m": "null:4", "large": "null:600k"}, [replica("m"), replica("large")], slo_ms=20_000.0)
    document["nodes"] = [{**document["nodes"][0], "name": name} for name in ("one", "two")]
    return document


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster("gpuprof:one", "gpuprof:two") as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", started.address)
        yield started


@needs_ray
@pytest.mark.slow
def test_a_node_that_dies_loses_no_accepted_request_of_two_nodes(tmp_path: Path, cluster: RayCluster) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(chain)
    certificate.private_key_pem.write_to_path(key)
    key.chmod(0o600)  # the server refuses a key that others can read
    options = ["--engine", "ray", "--tls-cert", str(chain), "--tls-key", str(key)]
    with running(tmp_path, two_nodes(), *options) as server:
        server.context = ssl.create_default_context()
        authority.configure_trust(server.context)
        assert figure(server, "gpuprof_workers_ready") == 4
        values = [float(number) for number in range(150_000)]
        assert server.infer("large", values)[1]["outputs"][0]["data"] == values
        _move_to_another_map(tmp_path, server)
        with Askers(server, "m", 2) as askers:
            _kill_node(cluster, server)
            assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 2)
            status_count = len(askers.statuses)
            assert eventually(lambda: len(askers.statuses) > status_count + 20)
        cluster.do("add gpuprof:two")
        assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 4, limit_s=100.0)
        assert askers.wrong == askers.lost == []
        assert set(askers.statuses) == {200}
        code, errors = server.stop()
        assert code == 0 and errors.endswith("drained\n")


def _move_to_another_map(tmp_path: Path, server: RunningServer) -> None:
    """Apply a map in which the second node has another replica; the first is not touched, and no request is lost."""
    changed = json.loads(json.dumps(two_nodes()))  # each node with replicas of its own
    changed["nodes"][1]["gpus"][0]["partitions"][0]["replicas"][0]["batch"] = 2
    workers = _workers()
    with Askers(server, "m", 2) as askers:
        assert apply(server, tmp_path / "other.json", changed) == 0
    assert askers.wrong == askers.lost == []
    assert set(askers.statuses) == {200}
    assert figure(server, "gpuprof_workers_ready") == 4
    assert len(_workers() & workers) == 3
    assert len(_workers() - workers) == 1


def _workers() -> set[int]:
    """Return the workers of both nodes; those of other servers of this machine belong to other nodes."""
    processes = list(psutil.process_iter(["cmdline"]))
    return {
        process.pid for process in processes if _is_worker(process, "worker:one/") or _is_worker(process, "worker:two/")
    }


@needs_ray
@pytest.mark.slow
def test_in_a_cluster_too_the_map_follows_the_load(here: Path, cluster: RayCluster) -> None:
    rows = [
        measured_row(
            "net", 1, 1000.0 / share, device=local_cpu().name, share=share, path="null:4", sha256="0" * 64,
            repeats=100, std_ms=0.0, memory=2**26,
        )
        for share in (25.0, 50.0, 75.0, 100.0)
    ]  # fmt: skip
    database(here / "gpuprof-db", rows)
    (here / "slo.csv").write_text("model,rate_rps,slo_ms\nnet,20,400\n")
    assert main(["place", "-o", "first.json", "--max-batch", "1"]) == 0
    document = json.loads((here / "first.json").read_text())
    document["nodes"][0]["name"] = "one"
    where = ("--engine", "ray", "--insecure", "--log", "json")
    adapting = ("--adapt", "--adapt-period", "1", "--db", str(here / "gpuprof-db"))
    with running(here, document, *where, *adapting) as server:
        with Loaded(Target.parse(server.url), RequestStream("net", 60.0, 400.0)) as loaded:
            assert eventually((here / "map.adapted.json").exists, limit_s=90.0)
            assert eventually(lambda: figure(server, "gpuprof_replica_planned_rps") > 60.0)
        _, errors = server.stop()
    assert all(result.lost == result.failed == 0 for result in loaded.results)
    moved = decisions(errors, "another map is served")[0]
    assert moved["started"] and moved["planned_rps"]["net"] > 60.0
    assert [node.name for node in read_map(here / "map.adapted.json").nodes] == ["one"]


def _kill_node(cluster: RayCluster, server: RunningServer) -> None:
    """Kill the workers and the machine of the second node, as the end of a machine does, and Ray's node itself."""
    workers = [process for process in psutil.process_iter(["cmdline"]) if _is_worker(process, "worker:two/")]
    (machine,) = {psutil.Process(worker.ppid()) for worker in workers}
    for process in (machine, *workers):
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
        running(tmp_path, document, "--engine", "ray", "--insecure"),
    ):
        pass


@pytest.mark.slow
@needs_ray
def test_without_a_cluster_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with (
        pytest.raises(AssertionError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"),
        running(tmp_path, two_nodes(), "--engine", "ray"),
    ):
        pass
