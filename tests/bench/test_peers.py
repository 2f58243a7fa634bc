"""Other servers that `bench.serving` measures: how they are installed and asked."""

import base64
import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bench.peers.environment import Environment, PeerMissingError
from bench.peers.peer import PEERS
from bench.peers.peer_model import PeerModel
from bench.peers.triton import describe_model
from gpuprof import build_model


class PlayedPip:
    """What pip would install, and how often it was let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str, error: str = "") -> None:
        self.installed = 0
        self._report = json.dumps({"install": [{"metadata": {"name": name}} for name in names]})
        self._error = error
        monkeypatch.setattr(venv, "create", lambda home, **_: home.mkdir(parents=True, exist_ok=True))
        monkeypatch.setattr(subprocess, "run", self._run)

    def _run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if self._error:
            return subprocess.CompletedProcess(command, 1, "", self._error)
        self.installed += "--dry-run" not in command
        return subprocess.CompletedProcess(command, 0, self._report, "")


def test_triton_is_told_the_tensors_of_the_model(tmp_path: Path) -> None:
    file = build_model("mlp", tmp_path / "mlp.onnx")
    configuration = describe_model(str(file), 2)
    entry = onnx.load(file).graph.input[0]
    shape = [dim.dim_value or -1 for dim in entry.type.tensor_type.shape.dim]
    assert f'input [{{name: "{entry.name}" data_type: TYPE_FP32 dims: {shape}}}]' in configuration
    assert "count: 2" in configuration and f'string_value: "{file}"' in configuration
    assert 'input [{name: "INPUT0" data_type: TYPE_FP32 dims: [1, -1]}]' in describe_model("null:4", 1)


@pytest.mark.parametrize("name", ["torch", "nvidia-cublas-cu12", "triton"])
def test_a_peer_that_needs_cuda_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pip = PlayedPip(monkeypatch, "litserve", name)
    with pytest.raises(PeerMissingError, match=f"p would bring {name}"):
        Environment("p", ("a",)).python(tmp_path)
    assert pip.installed == 0


def test_a_peer_that_cannot_be_had_is_named_with_pips_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PlayedPip(monkeypatch, error="WARNING: x\nERROR: No matching distribution found for a\n")
    with pytest.raises(PeerMissingError, match="p cannot be installed: ERROR: No matching distribution found for a"):
        Environment("p", ("a",)).python(tmp_path)


def test_every_peer_is_sent_the_same_tensor() -> None:
    tensor = np.asarray([1.5, -2.0], np.float32).tobytes()
    sent = {}
    for peer in PEERS:
        head, body = peer.http_request(tensor, b"ours\r\n\r\nContent-Length: 0").split(b"\r\n\r\n", 1)
        if peer.name == "triton":
            assert (head, body) == (b"ours", b"Content-Length: 0")
            continue
        assert f"Content-Length: {len(body)}\r\n".encode() in head + b"\r\n"
        sent[peer.name] = body
    assert base64.b64decode(json.loads(sent["litserve"])["data"]) == sent["ray"] == tensor
    assert json.loads(sent["mlserver"])["inputs"][0]["data"] == [1.5, -2.0]


def test_a_peers_identity_gives_back_what_it_takes() -> None:
    tensor = np.asarray([1.5, -2.0], np.float32).tobytes()
    assert PeerModel("null:8").run(tensor) == tensor
