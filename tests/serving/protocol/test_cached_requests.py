"""A request that differs from an earlier one only in its tensors is read as if it were the first."""

from __future__ import annotations

import asyncio
import struct
from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.protocol.grpc_messages import decode_infer, message_class, read_infer
from gpuprof.serving.protocol.http_api import HttpApi
from gpuprof.serving.protocol.inference_service import MOST_CACHED
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, read_request
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.server_settings import ServerSettings
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.datatypes import ModelSpec, TensorSpec
from gpuprof.serving.transport.inference import RefusedError

NUMBERS = (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "UINT8", (-1, 1)))
TEXTS = (TensorSpec("s", "BYTES", (-1, 1)),)
SIZES = {"a": 8, "b": 1, "s": 5}
BODIES = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.permutations(["a", "b"]),
        st.sampled_from([None, 64, 4096]),
        st.sampled_from([{}, {"timeout": 500}, {"priority": 1}]),
        st.integers(0, 2),
        st.binary(min_size=54, max_size=54),
    ),
    max_size=12,
)


def serve(inputs: tuple[TensorSpec, ...]) -> tuple[HttpApi, ServedModel]:
    async def main() -> tuple[HttpApi, ServedModel]:
        router = Router(Arena(1 << 16))
        model = ServedModel("m", 100.0, router.arena)
        model.spec = ModelSpec("m", "1", "test", inputs, (TensorSpec("y", "FP32", (-1, 2)),), 4)
        api = HttpApi(router, ServerSettings())
        router.publish([model])
        return api, model

    return asyncio.run(main())


def http_body(rows: int, names: list[str], data: bytes, missing: int = 0, **fields: Any) -> RequestBody:
    by_name = {tensor.name: tensor for tensor in (*NUMBERS, *TEXTS)}
    entries = [
        {
            "name": name,
            "datatype": by_name[name].datatype,
            "shape": [rows, *by_name[name].shape[1:]],
            "parameters": {"binary_data_size": rows * SIZES[name]},
        }
        for name in names
    ]
    text = orjson.dumps({"inputs": entries, **fields})
    size = rows * sum(SIZES[name] for name in names) - missing
    return RequestBody(text + data[: max(0, size)], len(text))


def grpc_body(rows: int, names: list[str], data: bytes, missing: int, parameters: dict[str, int]) -> RequestBody:
    message = message_class("ModelInferRequest")(model_name="m")
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    begin = 0
    for tensor in (tensor for name in names for tensor in NUMBERS if tensor.name == name):
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[rows, *tensor.shape[1:]])
        end = begin + rows * SIZES[tensor.name]
        message.raw_input_contents.append(data[begin:end])
        begin = end
    if missing and message.raw_input_contents[-1]:
        message.raw_input_contents[-1] = message.raw_input_contents[-1][:-missing]
    return RequestBody(message.SerializeToString())


def plain(request: InferRequest, body: RequestBody) -> tuple[object, ...]:
    inputs = [(t.shape, t.data if isinstance(t.data, tuple) else bytes(t.data)) for t in request.find_tensors(body)]
    return inputs, request.id, request.rows, request.outputs, request.binary, request.urgency


def read_call(spec: ModelSpec, body: RequestBody) -> InferRequest:
    return read_infer(spec, decode_infer(body.data), body.data)


def read_cached_call(api: HttpApi, body: RequestBody) -> InferRequest:
    return api.grpc.read(body.data)[1]


@given(BODIES)
def test_each_request_is_what_it_would_be_by_itself(
    drawn: list[tuple[int, list[str], int | None, Any, int, bytes]],
) -> None:
    api, model = serve(NUMBERS)
    for rows, names, offset, parameters, missing, data in drawn * 2:
        http = http_body(rows, names, data, missing, parameters=parameters)
        grpc = grpc_body(rows, names, data, missing, parameters)
        http.offset = grpc.offset = offset
        readers = (
            (http, partial(read_request, model.spec), partial(api._read, model)),
            (grpc, partial(read_call, model.spec), partial(read_cached_call, api)),
        )
        for body, read, read_cached in readers:
            try:
                expected = plain(read(body), body)
            except RefusedError as refusal:
                with pytest.raises(RefusedError) as refused:
                    read_cached(body)
                assert refused.value.message == refusal.message
            else:
                assert plain(read_cached(body), body) == expected


def test_what_is_known_is_not_read_again_and_only_so_much_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    api, model = serve(NUMBERS)
    first = http_body(1, ["a", "b"], bytes(9), id="1")
    request = api._read(model, first)
    assert api._read(model, http_body(1, ["a", "b"], struct.pack("<ffx", 1.0, 2.0), id="1")) is request
    for number in range(2 * MOST_CACHED):
        api._read(model, http_body(1, ["a", "b"], bytes(9), id=str(number)))
    assert len(api.service.cached) <= MOST_CACHED
    api.router.publish([model])
    assert not api.service.cached  # another model may have this name now


def test_strings_are_looked_into_each_time() -> None:
    api, model = serve(TEXTS)
    assert api._read(model, http_body(1, ["s"], b"\1\0\0\0a")).rows == 1
    with pytest.raises(RefusedError):
        api._read(model, http_body(1, ["s"], b"\7\0\0\0a"))
