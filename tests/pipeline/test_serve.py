"""`gpuprof.serve`: a server in processes of its own, for as long as a context lasts."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from gpuprof.domain.deployment import parse_map
from gpuprof.errors import InputError
from gpuprof.pipeline.serve import MapServer, ServeSettings, serve
from tests.reruns import serves_in_real_time
from tests.serving.running import eventually, has_ended, map_of, replica

pytestmark = serves_in_real_time

ANY_PORT = ServeSettings(port=0)
ONE = map_of({"m": "null:4"}, [replica("m")])


def infer(server: MapServer, model: str = "m") -> int:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
    body = json.dumps({"inputs": [tensor]}).encode()
    with urllib.request.urlopen(f"{server.url}/v2/models/{model}/infer", body, timeout=30) as answer:
        status: int = answer.status
        return status


def test_a_map_is_served_while_the_context_lasts_and_no_longer() -> None:
    notes: list[str] = []
    deployment = parse_map(ONE, "the map")
    with serve(deployment, ANY_PORT, note=notes.append) as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert (server.map, server.models, server.workers, server.grpc_url) == (deployment, 1, 1, None)
        assert notes == [f"serving 1 model with 1 worker on {server.url}"]
        assert infer(server) == 200
        children = psutil.Process(server.pid).children(recursive=True)
        assert children
    assert not psutil.pid_exists(server.pid)
    assert eventually(lambda: all(has_ended(child) for child in children))


def test_the_servers_map_can_be_changed(tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text(json.dumps(map_of({"m": "null:4", "n": "null:4"}, [replica("m"), replica("n")])))
    with serve(parse_map(ONE, "the map"), ANY_PORT) as server:
        changed = server.apply(tmp_path / "two.json")
        assert (len(changed.kept), len(changed.started), changed.stopped) == (1, 1, ())
        assert infer(server, "n") == 200
    assert [row["change"] for row in changed.rows()] == ["kept", "started"]


def test_what_cannot_be_served_is_an_error_here(tmp_path: Path) -> None:
    missing = parse_map(map_of({"m": "nowhere.onnx"}, [replica("m")]), "the map")
    with pytest.raises(InputError, match=r"cannot read .*nowhere\.onnx"), serve(missing, ANY_PORT):
        pass


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(ONE))
    program = (
        "import sys, time\n"
        "from gpuprof.pipeline.serve import serve\n"
        "from gpuprof.pipeline.serve import ServeSettings\n"
        "with serve(sys.argv[1], ServeSettings(port=0)) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    assert eventually(lambda: has_ended(server))
