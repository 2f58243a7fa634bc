"""A worker whose router goes, whenever that is."""

from __future__ import annotations

import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.runtime.providers import ORT_CPU, ORT_CUDA, TORCH_CUDA
from gpuprof.serving.transport.rendezvous import RendezvousKey
from gpuprof.serving.transport.wire import BlockingStream, Kind
from gpuprof.serving.worker import worker
from gpuprof.serving.worker.worker import warm_sizes
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time

ORDER = {
    "model": "m", "version": "1", "path": "null:4", "batch": 2, "threads": 1, "provider": "CPUExecutionProvider",
    "cores": [], "quota_cores": None, "group": "m", "sha256": "",
}  # fmt: skip


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The router's end of the connection of the worker that is worked next, in this process."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(worker, "join_rendezvous", lambda key, number, said: BlockingStream(theirs))
    monkeypatch.setattr(worker, "gc", SimpleNamespace(collect=list, freeze=list))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with ours, theirs:
        yield ours


def work() -> int:
    return worker.work("7", RendezvousKey("unix:nowhere", ""), None)


def test_one_whose_router_goes_while_it_loads_ends_without_a_word(
    router: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    BlockingStream(router).send(Kind.RUN, ORDER)
    router.close()
    assert work() == 0
    assert capsys.readouterr().err == ""


def test_one_that_is_never_told_what_to_serve_ends(router: socket.socket) -> None:
    router.close()
    assert work() == 0


def test_one_that_cannot_load_its_model_says_why_if_anybody_is_there(router: socket.socket) -> None:
    BlockingStream(router).send(Kind.RUN, {**ORDER, "path": "nowhere.onnx"})
    assert work() == 3
    frame = BlockingStream(router).receive()
    assert frame is not None and frame.kind == Kind.REFUSED and "nowhere.onnx" in frame.head[1]


def test_nor_does_it_fail_when_nobody_is(router: socket.socket) -> None:
    BlockingStream(router).send(Kind.RUN, {**ORDER, "path": "nowhere.onnx"})
    router.close()
    assert work() == 0


def test_on_a_gpu_every_batch_size_is_run_before_it_is_served() -> None:
    assert warm_sizes(6, ORT_CUDA) == warm_sizes(6, TORCH_CUDA) == (1, 2, 3, 4, 5, 6)
    assert warm_sizes(6, ORT_CPU) == (1, 2, 4, 6) and warm_sizes(1, ORT_CUDA) == (1,)
