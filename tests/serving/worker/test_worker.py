"""A worker whose router goes, whenever that is."""

import hashlib
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from gpuprof.errors import InputError
from gpuprof.graph.file import read_onnx
from gpuprof.runtime.providers import ORT_CPU, ORT_CUDA
from gpuprof.serving.transport.rendezvous import RendezvousKey
from gpuprof.serving.transport.wire import BlockingStream, FrameKind
from gpuprof.serving.worker import worker
from gpuprof.serving.worker.runtime import BoundRuntime
from gpuprof.serving.worker.worker import check_model_file
from tests.reruns import serves_in_real_time
from tests.runtime.played_gpu import PlayedMemory, play_gpu
from tests.serving.running import map_of, replica, running
from tests.small_models import floats, write_model

pytestmark = serves_in_real_time

ORDER = {
    "model": "m", "version": "1", "path": "null:4", "batch": 2, "threads": 1, "provider": "CPUExecutionProvider",
    "cores": [], "quota_cores": None, "group": "m", "turns": "", "sha256": "",
}  # fmt: skip


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The router's end of the connection of the worker that is worked next, in this process."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(worker, "join_rendezvous", lambda key, number, hello: BlockingStream(theirs))
    monkeypatch.setattr(worker, "gc", SimpleNamespace(collect=list, freeze=list))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with ours, theirs:
        yield ours


def work() -> int:
    return worker.run_worker(["7"], RendezvousKey("unix:nowhere", ""), None)


def test_a_worker_whose_router_goes_ends_silently(router: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    BlockingStream(router).send(FrameKind.RUN, ORDER)
    router.close()
    assert work() == 0
    assert capsys.readouterr().err == ""


def test_one_that_is_never_told_what_to_serve_ends(router: socket.socket) -> None:
    router.close()
    assert work() == 0


def test_one_that_cannot_load_its_model_says_why_if_anybody_is_there(router: socket.socket) -> None:
    BlockingStream(router).send(FrameKind.RUN, {**ORDER, "path": "nowhere.onnx"})
    assert work() == 3
    frame = BlockingStream(router).receive()
    assert frame is not None and frame.kind == FrameKind.REFUSED and "nowhere.onnx" in frame.head[1]


@pytest.mark.parametrize(
    ("op", "memory", "sizes"),
    [
        ("Conv", None, [6]),  # without CUDA's runtime partial batches are padded
        ("Conv", PlayedMemory(), [1, 2, 4, 6]),
        ("Add", PlayedMemory(), [1, 2, 3, 4, 5, 6]),
    ],
)
def test_on_a_gpu_every_size_that_is_run_is_run_before_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, memory: PlayedMemory | None, sizes: list[int]
) -> None:
    play_gpu(monkeypatch, lambda options: None)
    weights = {"w": np.ones((1, 1, 3, 3), np.float32)}
    nodes = [helper.make_node(op, ["x", "w"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["N", 1, 3, 3]}, {"y": ["N", 1, None, None]}, weights)
    ran: list[int] = []

    class Watched(BoundRuntime):
        def run(self, inputs: Any, wanted: Any) -> Any:
            ran.append(len(inputs[0]))
            return super().run(inputs, wanted)

    monkeypatch.setattr(worker, "open_runtime", lambda *_, **__: Watched("m", "1", path, 6, 1, ORT_CPU, "cpu", memory))
    order = ORDER | {"path": str(path), "batch": 6, "provider": ORT_CUDA, "sha256": None}
    monkeypatch.setattr(worker, "check_model_file", lambda *_: None)
    worker._load(order)
    assert ran == sizes


def adder(path: Path, value: float = 1.0) -> Path:
    node = helper.make_node("Add", ["INPUT0", "w"], ["OUTPUT0"])
    return write_model(path, [node], {"INPUT0": ["n", 1]}, {"OUTPUT0": ["n", 1]}, {"w": floats(1) + value})


def test_the_file_that_was_planned_with_is_taken_and_another_named(tmp_path: Path) -> None:
    path = adder(tmp_path / "m.onnx")
    check_model_file(path, hashlib.sha256(path.read_bytes()).hexdigest())
    check_model_file(path, "")
    with pytest.raises(InputError, match=r"m\.onnx is not the file that the map was planned with") as raised:
        check_model_file(path, "0" * 64)
    assert "--allow-changed" in raised.value.fix
    path.write_bytes(b"damaged")
    with pytest.raises(InputError, match="is not the file"):
        check_model_file(path, "0" * 64)
    with pytest.raises(InputError, match="cannot read"):
        check_model_file(tmp_path / "nowhere.onnx", "0" * 64)
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(InputError, match="named pipe"):
        check_model_file(tmp_path / "pipe.onnx", "0" * 64)


def test_data_that_stands_outside_of_the_file_counts(tmp_path: Path) -> None:
    path = adder(tmp_path / "m.onnx")
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    planned = read_onnx(path).sha256
    check_model_file(path, planned)
    data = tmp_path / "m.data"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(InputError, match="is not the file"):
        check_model_file(path, planned)


@pytest.mark.slow
def test_a_changed_file_is_refused_at_the_start_and_served_where_that_is_wanted(tmp_path: Path) -> None:
    document = map_of({"m": str(adder(tmp_path / "m.onnx"))}, [replica("m")])
    document["models"]["m"]["sha256"] = "0" * 64
    with pytest.raises(AssertionError, match=r"m\.onnx is not the file"), running(tmp_path, document):
        pass
    with running(tmp_path, document, "--allow-changed") as server:
        assert server.infer("m", [1.0])[0] == 200
