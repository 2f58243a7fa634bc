"""Functions for the processes of a `ParsePool`: parse and write requests and answers with tensors as text."""

from __future__ import annotations

from dataclasses import replace

from gpuprof.serving.protocol.infer_response import write_response
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, read_request
from gpuprof.serving.transport.arena import Arena, Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import InputTensor, OutputTensor, out_of_memory
from gpuprof.serving.transport.metadata import ModelSpec
from gpuprof.serving.transport.wire import Buffer


def read_large_request(spec: ModelSpec, data: bytes, json_bytes: int) -> InferRequest:
    """Read a request of HTTP, its tensors as bytes.

    Raises
    ------
    RefusedError
        400, saying what is wrong.
    """
    request = read_request(spec, RequestBody(data, json_bytes))
    return _with_bytes(request)


def read_large_call(spec: ModelSpec, message: Buffer) -> InferRequest:
    """Read a request of gRPC, its tensors as bytes.

    Raises
    ------
    RefusedError
        400, saying what is wrong.
    """
    from gpuprof.serving.protocol.grpc_messages import InferCall, read_infer

    return _with_bytes(read_infer(spec, InferCall.decode(message)))


def write_large_response(
    spec: ModelSpec, request: InferRequest, outputs: list[OutputTensor]
) -> tuple[bytes, list[Buffer]]:
    """Return the JSON of an answer of HTTP and the binary tensors that follow it.

    Raises
    ------
    RefusedError
        400, when an output that JSON cannot carry was asked for in JSON.
    """
    text, binary = write_response(spec, request, outputs)
    return text, [bytes(tensor) for tensor in binary]


def place_inputs(request: InferRequest, arena: Arena) -> tuple[InferRequest, list[Slot]]:
    """Copy the large tensors of a request into the arena; return it so, and the slots that it holds.

    Raises
    ------
    RefusedError
        503, when the arena is full.
    """
    slots: list[Slot] = []
    for tensor in request.inputs:
        if type(tensor.data) is not bytes or len(tensor.data) > INLINE_BYTES:
            break
    else:
        return request, slots  # small ones, as they are: making another request takes longer than all the rest
    return replace(request, inputs=[_place(tensor, arena, slots) for tensor in request.inputs]), slots


def _place(tensor: InputTensor, arena: Arena, slots: list[Slot]) -> InputTensor:
    data = tensor.data
    if isinstance(data, tuple):
        return tensor
    if len(data) <= INLINE_BYTES:  # a view would keep all of the message
        return InputTensor(tensor.shape, bytes(data)) if isinstance(data, memoryview) else tensor
    slot = arena.take(len(data))
    if slot is None:
        for taken in slots:
            arena.give_back(taken)
        raise out_of_memory()
    slots.append(slot)
    arena.view(slot.offset, len(data))[:] = data
    return InputTensor(tensor.shape, (slot.offset, len(data)))


def _with_bytes(request: InferRequest) -> InferRequest:
    """Return the request with tensors that can travel between processes."""
    inputs = [
        tensor if isinstance(tensor.data, tuple) else InputTensor(tensor.shape, bytes(tensor.data))
        for tensor in request.inputs
    ]
    return replace(request, inputs=inputs)
