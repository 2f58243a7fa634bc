"""Large texts, which another process reads and writes as they would be here."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

import pytest

from gpuprof.errors import UnavailableError
from gpuprof.serving.protocol.grpc_messages import read_large_call
from gpuprof.serving.protocol.infer_response import write_response
from gpuprof.serving.protocol.inference_service import MAX_TEXT_BYTES, refuse_long_text
from gpuprof.serving.router.infer_request import RequestBody, read_request
from gpuprof.serving.transport.inference import OutputTensor, RefusedError
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec
from gpuprof.serving.watch.side_process import SideProcess
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time

SPEC = ModelSpec(
    "m", "1", "test", (TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, -1)),), max_batch=4
)


def die() -> None:
    os._exit(9)


def with_process(test: Callable[[SideProcess], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        process = SideProcess()
        try:
            await test(process)
        finally:
            process.close()

    asyncio.run(main())


def test_requests_and_answers_are_read_and_written_elsewhere_as_they_would_be_here() -> None:
    from tritonclient.grpc import service_pb2

    async def test(process: SideProcess) -> None:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 20_000], "data": list(range(20_000))}
        data = json.dumps({"id": "7", "inputs": [tensor]}).encode()
        request = await process.run(read_request, SPEC, RequestBody(data, len(data)))
        assert request.id == "7" and isinstance(request.inputs[0].data, bytes)
        outputs = [OutputTensor(0, [1, 20_000], request.inputs[0].data)]
        text, binary = await process.run(write_response, SPEC, request, outputs)
        assert json.loads(text)["outputs"][0]["data"] == list(range(20_000)) and not binary
        message = service_pb2.ModelInferRequest(model_name="m", id="7")
        message.inputs.add(name="x", datatype="FP32", shape=[1, 3]).contents.fp32_contents.extend([1.0, 2.0, 3.0])
        called = await process.run(read_large_call, SPEC, message.SerializeToString())
        assert isinstance(called.inputs[0].data, bytes) and len(called.inputs[0].data) == 12

    with_process(test)


def test_an_error_there_is_an_error_here_and_after_a_death_another_process_follows() -> None:
    async def test(process: SideProcess) -> None:
        with pytest.raises(RefusedError, match="not JSON") as raised:
            await process.run(read_request, SPEC, RequestBody(b"nothing", 7))
        assert raised.value.status == HTTPStatus.BAD_REQUEST
        with pytest.raises(UnavailableError, match="ValueError: invalid literal"):
            await process.run(int, "x")
        pid = await process.run(os.getpid)
        assert pid not in (os.getpid(), 0)
        with pytest.raises(UnavailableError, match="ended meanwhile"):
            await process.run(die)
        assert await process.run(os.getpid) not in (pid, os.getpid())

    with_process(test)


def test_a_text_that_is_too_long_is_not_read() -> None:
    refuse_long_text(MAX_TEXT_BYTES)
    with pytest.raises(RefusedError, match="send tensors as binary data"):
        refuse_long_text(MAX_TEXT_BYTES + 1)
