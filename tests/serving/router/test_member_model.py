"""Requests of a member become requests of the merged model, and their answers the member's again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuprof.domain.deployment import PublicName
from gpuprof.graph.merged_model import MergedMember, MergedValue
from gpuprof.serving.router.router import MemberModel, PlannedMember
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.datatypes import ModelSpec, TensorSpec
from gpuprof.serving.transport.inference import Inference, InputTensor, OutputTensor


def _merged() -> tuple[Any, list[Inference]]:
    """Return a merged model of two members with an input and two outputs each, and the list of its requests."""
    sent: list[Inference] = []
    inputs = tuple(TensorSpec(f"{member}/x", "FP32", (-1, 3)) for member in "ab")
    outputs = tuple(TensorSpec(f"{member}/{name}", "FP32", (-1, 2)) for member in "ab" for name in ("u", "v"))
    spec = ModelSpec("merged", "1", "onnxruntime_onnx", inputs, outputs, 8)
    merged = SimpleNamespace(
        name="merged", arena=None, reserve=SimpleNamespace(percentile=99.0), replicas=[], spec=spec, submit=sent.append
    )
    return merged, sent


@pytest.mark.parametrize(("wanted", "names"), [(None, ["u", "v"]), ([1], ["v"]), ([1, 0], ["v", "u"])])
def test_a_member_has_its_own_inputs_and_outputs_alone(wanted: list[int] | None, names: list[str]) -> None:
    asyncio.run(_answer_a_member(wanted, names))  # models are made within a running loop


async def _answer_a_member(wanted: list[int] | None, names: list[str]) -> None:
    merged, sent = _merged()
    values = tuple(MergedValue(name, f"b/{name}", "float32", (None, 2)) for name in ("u", "v"))
    tensors = MergedMember("b", "b.onnx", "", (MergedValue("x", "b/x", "float32", (None, 3)),), values)
    member = MemberModel(cast(ServedModel, merged), PlannedMember(PublicName("b"), 50.0, tensors))
    assert [spec.name for spec in member.spec.outputs] == ["u", "v"]
    answers: list[list[OutputTensor]] = []
    member.submit(
        Inference(
            rows=4,
            inputs=[InputTensor([4, 3], b"rows of b")],
            wanted=wanted,
            arrived=0.0,
            deadline_ms=50.0,
            on_done=lambda inference, outputs, slot: answers.append(outputs),
            on_refused=lambda error: None,
        )
    )
    (request,) = sent
    assert [(tensor.shape, bytes(tensor.data)) for tensor in request.inputs] == [([0, 3], b""), ([4, 3], b"rows of b")]
    assert request.wanted == [2, 3]
    # The worker answers in an order of its own.
    request.on_done(request, [OutputTensor(3, [4, 2], b"b/v"), OutputTensor(2, [4, 2], b"b/u")], None)
    (outputs,) = answers
    positions = {"u": 0, "v": 1}
    assert [(tensor.position, bytes(tensor.data)) for tensor in outputs] == [
        (positions[name], f"b/{name}".encode()) for name in names
    ]
