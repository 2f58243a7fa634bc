"""Requests of gRPC wait for their model's turn beside those of HTTP while the router cannot keep up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from gpuprof.serving.protocol.grpc_inference import InferenceCalls
from gpuprof.serving.protocol.grpc_messages import open_call
from gpuprof.serving.protocol.grpc_reader import MessageReader
from gpuprof.serving.protocol.loop_turns import LoopTurns
from gpuprof.serving.protocol.open_inference import message_class
from gpuprof.serving.protocol.parse_pool import ON_LOOP_BYTES
from gpuprof.serving.protocol.protocol_parts import ProtocolParts
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import Inference, RefusedError
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec


class Context:
    """Stands where grpcio's context of a call is."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4242"

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class Model:
    """Notes who is submitted, and is done with it."""

    def __init__(self, name: str, submitted: list[str], arena: Arena) -> None:
        self.name = name
        self._arena = arena
        tensors = (TensorSpec("x", "FP32", (-1, 1)),)
        self.spec = ModelSpec(name, "1", "test", tensors, tensors, 4)
        self._submitted = submitted

    def limit_deadline_ms(self, timeout_ms: float | None) -> float:
        return 1000.0

    def submit(self, inference: Inference) -> None:
        self._submitted.append(self.name)
        inference.release(self._arena)


class Calls:
    """Calls of two models, and the turns of a loop that a test begins by hand."""

    tracer = None

    def __init__(self) -> None:
        self.arena = Arena(1 << 20)
        self.submitted: list[str] = []
        self.due: list[Callable[[], object]] = []
        self.turns = LoopTurns(self.due.append)
        models = {name: Model(name, self.submitted, self.arena) for name in ("cheap", "dear")}
        reader = MessageReader(self.arena, 1 << 16)
        self._calls = InferenceCalls(cast(Any, self), reader, 1.0, ProtocolParts(turns=self.turns))
        self.find = lambda name, version: models[name]

    def ask(self, name: str, value: bytes = bytes(4)) -> asyncio.Task[Inference]:
        request = message_class("ModelInferRequest")(model_name=name)
        request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        request.raw_input_contents.append(value)
        data = request.SerializeToString()
        assert self.arena.charge(len(data))
        self._calls._reader._charged += len(data)
        call = open_call(data, ON_LOOP_BYTES)
        return asyncio.ensure_future(self._calls.accept(call, Context(), lambda outcome: None))


async def pause() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Any) -> None:
    async def main() -> None:
        calls = Calls()
        await test(calls)
        assert calls.arena.used == 0
        calls.arena.close()

    asyncio.run(main())


def test_a_request_is_read_at_once_where_nobody_waits() -> None:
    async def test(calls: Calls) -> None:
        await calls.ask("cheap")
        assert calls.submitted == ["cheap"]
        assert calls.due == [calls.turns._close_turn]

    run(test)


def test_models_take_turns_and_calls_that_have_ended_take_none() -> None:
    async def test(calls: Calls) -> None:
        calls.turns.wait("of HTTP", lambda: calls.submitted.append("of HTTP"))
        asked = [calls.ask(name) for name in ("cheap", "cheap", "cheap", "dear")]
        await pause()
        asked[1].cancel()
        await pause()
        assert not calls.submitted
        while calls.due:
            calls.due.pop(0)()
        assert calls.submitted == ["of HTTP", "cheap", "dear", "cheap"]
        await asyncio.wait(asked)
        assert [one.cancelled() for one in asked] == [False, True, False, False]

    run(test)


def test_what_is_refused_in_its_turn_is_refused_to_its_call() -> None:
    async def test(calls: Calls) -> None:
        calls.turns.wait("of HTTP", lambda: None)
        asked = calls.ask("cheap", bytes(5))
        await pause()
        calls.due.pop(0)()
        with pytest.raises(RefusedError, match="bytes"):
            await asked
        assert not calls.submitted

    run(test)
