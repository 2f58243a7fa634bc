from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

import pytest

from gpuprof.serving.protocol.text_pool import (
    MAX_TEXT_BYTES,
    TextPool,
    place_inputs,
    read_large_call,
    read_large_request,
    refuse_long_text,
    write_large_response,
)
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import OutputTensor, RefusedError
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time

SPEC = ModelSpec(
    "m", "1", "test", (TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, -1)),), max_batch=4
)


def fail_for_want_of_memory() -> None:
    raise MemoryError


def die() -> None:
    os._exit(9)


def with_pool(test: Callable[[TextPool], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        pool = TextPool()
        await test(pool)
        pool.close()

    asyncio.run(main())


def test_requests_and_answers_are_read_and_written_elsewhere_as_they_would_be_here() -> None:
    async def test(pool: TextPool) -> None:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 20_000], "data": list(range(20_000))}
        data = json.dumps({"id": "7", "inputs": [tensor]}).encode()
        request = await pool.run(read_large_request, SPEC, data, len(data))
        assert request.id == "7" and isinstance(request.inputs[0].data, bytes)
        arena = Arena(1 << 20)
        placed, slots = place_inputs(request, arena)
        assert isinstance(placed.inputs[0].data, tuple) and arena.used == slots[0].size
        assert bytes(arena.view(*placed.inputs[0].data)) == request.inputs[0].data
        outputs = [OutputTensor(0, [1, 20_000], request.inputs[0].data)]
        text, binary = await pool.run(write_large_response, SPEC, request, outputs)
        assert json.loads(text)["outputs"][0]["data"] == list(range(20_000)) and not binary

    with_pool(test)


def test_typed_contents_are_read_elsewhere() -> None:
    from tritonclient.grpc import service_pb2

    async def test(pool: TextPool) -> None:
        message = service_pb2.ModelInferRequest(model_name="m", id="7")
        message.inputs.add(name="x", datatype="FP32", shape=[1, 3]).contents.fp32_contents.extend([1.0, 2.0, 3.0])
        request = await pool.run(read_large_call, SPEC, message.SerializeToString())
        assert isinstance(request.inputs[0].data, bytes) and len(request.inputs[0].data) == 12

    with_pool(test)


def test_what_is_wrong_there_is_a_refusal_here_and_the_next_is_served() -> None:
    async def test(pool: TextPool) -> None:
        with pytest.raises(RefusedError, match="not JSON") as raised:
            await pool.run(read_large_request, SPEC, b"nothing", 7)
        assert raised.value.status == HTTPStatus.BAD_REQUEST
        for function in (fail_for_want_of_memory, die):
            with pytest.raises(RefusedError, match="too much memory") as raised:
                await pool.run(function)
            assert raised.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        assert await pool.run(abs, -1) == 1

    with_pool(test)


def test_only_so_many_texts_wait() -> None:
    async def test(pool: TextPool) -> None:
        outcomes = await asyncio.gather(*(pool.run(abs, -1) for _ in range(40)), return_exceptions=True)
        assert outcomes.count(1) == 16
        assert all(isinstance(outcome, RefusedError) and outcome.overloaded for outcome in outcomes if outcome != 1)

    with_pool(test)


def test_a_text_that_is_too_long_is_not_read() -> None:
    refuse_long_text(MAX_TEXT_BYTES)
    with pytest.raises(RefusedError, match="send tensors as binary data"):
        refuse_long_text(MAX_TEXT_BYTES + 1)


def test_a_request_of_small_tensors_is_placed_as_it_is_and_holds_nothing() -> None:
    text = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}).encode()
    request, arena = read_large_request(SPEC, text, len(text)), Arena(1 << 16)
    placed, slots = place_inputs(request, arena)
    assert placed is request and slots == [] and arena.used == 0
