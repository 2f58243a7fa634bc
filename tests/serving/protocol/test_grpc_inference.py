"""What is kept of a call when it has been answered."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest

from gpuprof.serving.protocol.grpc_inference import InferenceCalls
from gpuprof.serving.protocol.grpc_messages import InferCall, read_infer
from gpuprof.serving.protocol.grpc_reader import MessageReader
from gpuprof.serving.protocol.open_inference import message_class
from gpuprof.serving.protocol.protocol_parts import ProtocolParts
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec
from tests.serving.protocol.test_grpc_turns import Calls, Context, Model


class OneMessage(Context):
    """A call with one message, whose callbacks outlive it, as grpcio's do."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self.done: list[Callable[[object], None]] = []

    async def read(self) -> bytes:
        return self._message

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.done.append(callback)


class AnsweringModel(Model):
    """Answers what it was asked."""

    def submit(self, inference: Inference) -> None:
        inference.on_done(inference, [OutputTensor(0, [1, 1], bytes(4))], None)
        inference.release(self._arena)


def test_who_is_told_that_a_call_is_done_keeps_no_answer() -> None:
    async def main() -> None:
        asked = Calls()
        arena: Arena = asked.arena
        asked.find = lambda name, version: AnsweringModel(name, asked.submitted, arena)
        calls = InferenceCalls(cast(Any, asked), MessageReader(arena, 1 << 16), 1.0, ProtocolParts())
        request = message_class("ModelInferRequest")(model_name="m")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        request.raw_input_contents.append(bytes(4))
        context = OneMessage(request.SerializeToString())
        answer = await calls.infer(None, context)
        assert len(context.done) == 1 and arena.used == len(answer)
        assert sys.getrefcount(answer) == 2  # the variable here, and the argument
        context.done[0](context)
        assert arena.used == 0

    asyncio.run(main())


@pytest.mark.parametrize("place", ["inputs", "outputs"])
@pytest.mark.parametrize("name", ["classification", "shared_memory_region"])
def test_what_would_change_the_answer_is_refused_and_not_passed_over(place: str, name: str) -> None:
    spec = ModelSpec("m", "1", "t", (TensorSpec("a", "UINT8", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),), 4)
    request = message_class("ModelInferRequest")(model_name="m", raw_input_contents=[b"ab"])
    request.inputs.add(name="a", datatype="UINT8", shape=[1, 2])
    request.outputs.add(name="y")
    assert read_infer(spec, InferCall.decode(request.SerializeToString())).outputs == [0]
    getattr(request, place)[0].parameters[name].int64_param = 3
    with pytest.raises(RefusedError, match=f"the parameter '{name}' is not supported"):
        read_infer(spec, InferCall.decode(request.SerializeToString()))
