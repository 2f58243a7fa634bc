"""A worker whose router goes, whenever that is."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from gpuprof.runtime.providers import ORT_CPU, ORT_CUDA
from gpuprof.serving.transport.rendezvous import RendezvousKey
from gpuprof.serving.transport.wire import BlockingStream, FrameKind
from gpuprof.serving.worker import worker
from gpuprof.serving.worker.runtime import BoundRuntime
from tests.reruns import serves_in_real_time
from tests.runtime.played_gpu import PlayedMemory, play_gpu
from tests.small_models import write_model

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


def test_one_whose_router_goes_while_it_loads_ends_without_a_word(
    router: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
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
