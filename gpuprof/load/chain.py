"""Requests of a chain of models: the outputs of a step are the inputs of the next, as a client passes them on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuprof.load.target import TensorData, join_request

if TYPE_CHECKING:
    from gpuprof.load.target import Target
    from gpuprof.serving.transport.metadata import TensorSpec

_JSON_LENGTH = b"inference-header-content-length:"


@dataclass(frozen=True, slots=True)
class NextStep:
    """A later step of a chain.

    Attributes
    ----------
    variants : sequence of sequence of TensorData
        Random inputs, sent alternately.
    sources : mapping of str to str
        The output of the step before that is sent as an input, by the input's name; other inputs are random.
    """

    target: Target
    model: str
    variants: Sequence[Sequence[TensorData]]
    sources: Mapping[str, str]

    def make_request(self, answer: bytes, number: int) -> bytes:
        """Return the whole HTTP request that follows ``answer``, the step before's whole HTTP answer."""
        outputs: dict[str, TensorData] = {}
        with suppress(ValueError, KeyError, TypeError):  # an answer that is not the protocol's
            outputs = {tensor.name: tensor for tensor in read_outputs(answer)}
        inputs = self.variants[number % len(self.variants)]
        fed = [outputs.get(self.sources.get(tensor.name, ""), tensor)._replace(name=tensor.name) for tensor in inputs]
        return join_request(self.target, self.model, fed)


def read_outputs(answer: bytes) -> list[TensorData]:
    """Return the binary tensors of an HTTP answer; empty for an answer in another form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(_JSON_LENGTH)]
    if not lengths:
        return []
    begin, tensors = int(lengths[0]), []
    for output in json.loads(body[:begin])["outputs"]:
        size = int(output.get("parameters", {}).get("binary_data_size", 0))
        tensors.append(
            TensorData(output["name"], output["datatype"], tuple(output["shape"]), body[begin : begin + size])
        )
        begin += size
    return tensors


def match_outputs(outputs: Sequence[TensorSpec], inputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the output that fits each input, by the input's name: of the same name, else the first left over.

    An output fits if its datatype is the same and its shape may be.
    """
    left = list(outputs)
    sources: dict[str, str] = {}
    for spec in sorted(inputs, key=lambda spec: spec.name not in {output.name for output in outputs}):
        same_type = (output for output in left if output.datatype == spec.datatype)
        if fitting := [output for output in same_type if _may_equal(output.shape, spec.shape)]:
            source = min(fitting, key=lambda output: output.name != spec.name)
            sources[spec.name] = source.name
            left.remove(source)
    return sources


def _may_equal(first: Sequence[int], second: Sequence[int]) -> bool:
    return len(first) == len(second) and all(a == b or -1 in (a, b) for a, b in zip(first, second, strict=True))
