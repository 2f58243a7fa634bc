"""The application of Ray Serve: how it divides requests, which GPUs its nodes take, and one that answers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import onnxruntime
import pytest
import yaml

import gpuprof
from gpuprof.domain.deployment import DeploymentMap, parse_map
from gpuprof.errors import UnavailableError
from gpuprof.pipeline.ray_serve import RayServeRouter, assign_gpus, weigh_nodes
from tests.export.test_export import MAP, merged_map
from tests.serving.ray_cluster import ray_cluster


def _map_of_two_nodes() -> DeploymentMap:
    content = json.loads(MAP.to_json())
    extra = json.loads(json.dumps(content["nodes"][1])) | {"name": "node2"}
    for replica in extra["gpus"][0]["partitions"][0]["replicas"]:
        replica["rate_rps"] *= 3
    content["nodes"].append(extra)
    return parse_map(content, "map")


def test_requests_are_divided_among_nodes_as_the_map_plans_and_evenly_in_time() -> None:
    weights = weigh_nodes(_map_of_two_nodes())
    assert weights["b"] == {"node1": 10.0, "node2": 30.0} == weights["b/1"]
    router = RayServeRouter(weights, {})
    picked = [router.pick_node("/v2/models/b/infer") for _ in range(40)]
    assert Counter(picked) == {"node1": 10, "node2": 30}
    assert all(picked[i : i + 4].count("node1") == 1 for i in range(0, 40, 4))


@pytest.mark.parametrize(
    ("path", "node"),
    [
        ("/v2/models/Net%2FA/infer", "node0"),
        ("/v2/models/Net%2FA", "node0"),
        ("/v2/models/Net%2FA/versions/1/infer", "node0"),
        ("/v2/models/Net%2FA/versions/2/infer", None),
        ("/v2/models/Net/A/infer", None),
        ("/v2/models", None),
        ("/v2/repository/index", None),
        ("/", None),
    ],
)
def test_the_node_of_a_path_has_the_model_and_version(path: str, node: str | None) -> None:
    assert RayServeRouter(weigh_nodes(MAP), {}).pick_node(path) == node


def test_each_model_of_a_merge_is_known() -> None:
    assert {"a", "b"} <= set(weigh_nodes(merged_map()))


def test_a_node_takes_the_gpus_that_ray_gives_it() -> None:
    node = MAP.nodes[1]
    assert [gpu.index for gpu in assign_gpus(node, ["3"]).gpus] == [3]
    with pytest.raises(UnavailableError, match="gave node node1 0 GPUs and the map has 1"):
        assign_gpus(node, [])
    with pytest.raises(UnavailableError, match="names its GPUs GPU-12ab"):
        assign_gpus(node, ["GPU-12ab"])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    "GPUPROF_RAY_SERVE_TESTS" not in os.environ, reason="GPUPROF_RAY_SERVE_TESTS is not set: a cluster for a minute"
)
def test_the_tool_itself_runs_an_exported_map_that_answers_what_the_model_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("READY_CHECK_TIMEOUT_S", "HEALTH_CHECK_TIMEOUT_S"):
        monkeypatch.setenv(f"RAY_SERVE_PROXY_{limit}", "100")  # a busy machine is no sick proxy
    pytest.importorskip("ray.serve.schema", reason="Ray Serve is not installed")
    file = gpuprof.build_model("mlp", tmp_path / "mlp.onnx")
    quick = gpuprof.ProfileSettings(time_limit_s=0.3, keep_unstable=True)
    gpuprof.profile([file], batches=(1, 2), shares=("1core",), device="cpu", db=tmp_path / "db", settings=quick)
    demand = gpuprof.Demand(str(file), rate_rps=5.0, slo=gpuprof.Slo(2000.0))
    plan = gpuprof.place([demand], fleet="cpu:1", db=tmp_path / "db")
    gpuprof.export(plan.deployment, "ray-serve").write(tmp_path / "bundle")
    config = yaml.safe_load((tmp_path / "bundle/serve_config.yaml").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"]["map"] = str(tmp_path / "bundle/map.json")  # in place of /srv/gpuprof
    application["deployments"][1]["ray_actor_options"]["num_cpus"] = 0.0  # the cluster's nodes have one core each
    (tmp_path / "serve_config.yaml").write_text(yaml.safe_dump(config))
    with ray_cluster("gpuprof:node0") as cluster, _running(tmp_path / "serve_config.yaml", cluster.address):
        url = f"http://127.0.0.1:{port}"
        _await_ready(url)
        described = _ask(f"{url}/v2/models/mlp")[1]["inputs"][0]
        sent = np.random.default_rng(0).random((1, *described["shape"][1:]), np.float32)
        body = {"inputs": [described | {"shape": sent.shape, "data": sent.ravel().tolist()}]}
        status, answer = _ask(f"{url}/v2/models/mlp/infer", body)
        (computed,) = onnxruntime.InferenceSession(file).run(None, {described["name"]: sent})
        assert status == 200 and answer["model_name"] == "mlp", answer
        assert answer["outputs"][0]["data"] == pytest.approx(computed.ravel().tolist(), rel=1e-4, abs=1e-5)
        assert _ask(f"{url}/v2/models/mlp/infer", {"inputs": []})[0] == 400
        missing = "no node answers /v2/models/nobody: ask for /v2/models/ and one of mlp"
        assert _ask(f"{url}/v2/models/nobody") == (404, {"error": missing})


@contextmanager
def _running(config: Path, address: str) -> Iterator[None]:
    command = [str(Path(sys.executable).with_name("serve")), "run", str(config), "--address", address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (config.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=_take_interrupts)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def _take_interrupts() -> None:
    """Undo what shells do to a job in the background: ``serve run`` ends by SIGINT, which it would ignore there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _await_ready(url: str) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until:
        with suppress(OSError):
            if _ask(f"{url}/v2/health/ready")[0] == 200:
                return
        time.sleep(0.5)
    pytest.fail("Ray Serve does not answer within four minutes")


def _ask(url: str, body: object = None) -> tuple[int, Any]:
    try:
        with urlopen(url, None if body is None else json.dumps(body).encode(), timeout=30) as response:
            return response.status, json.loads(response.read() or b"null")
    except HTTPError as error:
        with error:
            content = error.read()
        try:
            return error.code, json.loads(content)
        except ValueError:
            return error.code, content
