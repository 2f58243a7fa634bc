import json
import socket
from pathlib import Path
from typing import Any

import pytest

from gpuprof.cli.main import main
from tests.reruns import serves_in_real_time
from tests.serving.running import map_of, replica, running

pytestmark = serves_in_real_time


def write(directory: Path, document: dict[str, Any]) -> str:
    path = directory / "map.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_one_line_says_that_the_server_is_ready(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        assert server.line.startswith("serving 1 model with 1 worker on http://127.0.0.1:")
        assert server.stop()[0] == 0


def test_a_busy_port_is_one_line_and_exit_code_3(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", write(tmp_path, map_of({"m": "null:4"}, [replica("m")])), "--port", port]) == 3
    assert capfd.readouterr().err == f"gpuprof: port {port} is taken on 127.0.0.1 (choose another with --port)\n"


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    assert main(["serve", write(tmp_path, map_of({"m": "bad.onnx"}, [replica("m")])), "--port", "0"]) == 3
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith(f"gpuprof: {tmp_path / 'bad.onnx'} is not an ONNX model")
