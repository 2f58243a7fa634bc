"""The edge: its configuration, and its life beside the server's."""

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from gpuprof.errors import UnavailableError
from gpuprof.export.targets import envoy
from gpuprof.serving.edge.edge import EdgeSettings, find_envoy, remove_abandoned, render_bootstrap
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, has_ended, map_of, replica, running

ROUTER = {"pipe": {"path": "/router"}}


def filters_of(document: dict[str, object], listener: int = 0) -> list[str]:
    text = json.dumps(document)
    assert "$" not in text.replace("$comment", "") and '"when"' not in text
    chain = document["static_resources"]["listeners"][listener]["filter_chains"][0]  # type: ignore[index]
    return [part["name"].rsplit(".", 1)[1] for part in chain["filters"][0]["typed_config"]["http_filters"]]


def test_only_the_listeners_and_filters_that_are_needed_are_configured() -> None:
    plain = yaml.safe_load(render_bootstrap(EdgeSettings(ROUTER, grpc_port=1)))
    assert [listener["name"] for listener in plain["static_resources"]["listeners"]] == ["grpc"]
    assert filters_of(plain) == ["header_mutation", "buffer", "grpc_http1_reverse_bridge", "router"]
    assert "DownstreamTlsContext" not in json.dumps(plain) and "admin" not in plain
    guarded = yaml.safe_load(render_bootstrap(EdgeSettings(ROUTER, http_port=1, certificate="c", token="t" * 16)))
    assert filters_of(guarded) == ["rbac", "buffer", "router"]
    assert "DownstreamTlsContext" in json.dumps(guarded)


def test_a_token_is_a_value_whatever_it_looks_like() -> None:
    token = "{a: b, $host}: # '\"]"
    document = yaml.safe_load(render_bootstrap(EdgeSettings(ROUTER, http_port=1, token=token)))
    assert f"Bearer {token}" in json.dumps(document, ensure_ascii=False).replace('\\"', '"')


def test_envoy_takes_what_is_exported(tmp_path: Path) -> None:
    text = envoy().files["envoy.yaml"]
    for name in ("chain.pem", "key.pem"):  # without files of its own it would refuse the paths
        text = text.replace(f"/etc/envoy/{name}", str(tmp_path / name))
    document = yaml.safe_load(text)
    for listener in document["static_resources"]["listeners"]:
        del listener["filter_chains"][0]["transport_socket"]
    (path := tmp_path / "envoy.yaml").write_text(yaml.safe_dump(document))
    completed = subprocess.run(
        [find_envoy(), "--mode", "validate", "-c", path], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr


def test_what_is_no_envoy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="is not an executable file"):
        find_envoy(tmp_path / "envoy")
    (script := tmp_path / "other").write_text("#!/bin/sh\necho envoy version: 1/1.20.0/Clean\n")
    script.chmod(0o755)
    with pytest.raises(UnavailableError, match=r"is not Envoy 1\.36 or later"):
        find_envoy(script)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running(
        tmp_path, map_of({"m": "null:4"}, [replica("m")]), "--grpc-port", "0", "--public", "--insecure"
    ) as tls_server:
        yield tls_server


def edge_of(server: RunningServer) -> psutil.Process | None:
    children = psutil.Process(server.process.pid).children()
    return next((child for child in children if child.name() == "envoy"), None)


@serves_in_real_time
def test_folders_of_killed_servers_alone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    abandoned, living, starting = (tmp_path / f"gpuprof-edge-{name}" for name in ("abandoned", "living", "starting"))
    for folder in (abandoned, living, starting):
        folder.mkdir()
        (folder / "key.pem").touch()
    for folder in (abandoned, living):
        os.utime(folder, (0.0, 0.0))
    lock = os.open(living, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    remove_abandoned()
    os.close(lock)
    assert sorted(tmp_path.iterdir()) == [living, starting]


def test_an_edge_that_is_killed_is_started_again(server: RunningServer) -> None:
    assert server.infer("m", [1.0])[0] == 200
    edge = edge_of(server)
    assert edge is not None
    edge.kill()
    assert eventually(lambda: (now := edge_of(server)) is not None and now.pid != edge.pid)

    def answers() -> bool:
        try:
            return server.infer("m", [1.0])[0] == 200
        except OSError:
            return False

    assert eventually(answers)
    assert b"\ngpuprof_edge_restarts_total 1.0" in server.get("/metrics")[1]
    assert server.stop()[0] == 0 and edge_of_pid(edge.pid) is None


def edge_of_pid(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


@serves_in_real_time
def test_the_edge_ends_with_a_router_that_is_killed(server: RunningServer) -> None:
    edge = edge_of(server)
    assert edge is not None
    server.process.kill()
    assert eventually(lambda: has_ended(edge))
