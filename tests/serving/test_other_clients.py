"""A client of gRPC that others wrote, as it is: @grpc/grpc-js of npm."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from tests.serving.running import RunningServer, map_of, replica, running
from tests.serving.test_grpc import address_of

pytestmark = pytest.mark.slow

CLIENT = Path(__file__).with_name("grpc_js_client.js")
PROTO = Path(str(files("gpuprof.serving.protocol").joinpath("open_inference.proto")))
MODULES = Path(sys.prefix) / "grpc-js" / "node_modules"
needs_grpc_js = pytest.mark.skipif(
    shutil.which("node") is None or not MODULES.is_dir(), reason="no @grpc/grpc-js here: .ci/install-grpc-js.sh"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = {"small": "null:4", "large": "null:600k"}
    document = map_of(models, [replica("small"), replica("large")], slo_ms=60_000.0)
    with running(tmp_path_factory.mktemp("asked"), document, "--grpc-port", "0") as started:
        yield started


@needs_grpc_js
@pytest.mark.parametrize(("model", "elements"), [("small", 1), ("large", 150_000)])
def test_grpc_js_asks_in_every_way_that_it_has(server: RunningServer, model: str, elements: int) -> None:
    node = shutil.which("node")
    assert node is not None
    completed = subprocess.run(
        [node, str(CLIENT), address_of(server), str(PROTO), model, str(elements)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "NODE_PATH": str(MODULES)},
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout) == {
        "live": True,
        "metadata": model,
        "answered": 50,
        "unknown": 5,  # NOT_FOUND
        "wrong": 3,  # INVALID_ARGUMENT
        "late": 4,  # DEADLINE_EXCEEDED
        "stream": {"got": ["0", "1", "2", "3", "4"], "code": 0},
        "deflate": True,
        "gzip": True,
    }
