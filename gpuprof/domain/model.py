"""Models as graphs of ops with shapes, FLOPs and bytes at a batch size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

from gpuprof.domain.sizes import Sizes, sized_name

_DTYPE_BYTES = {
    "float64": 8.0, "int64": 8.0, "uint64": 8.0, "complex64": 8.0, "complex128": 16.0,
    "float32": 4.0, "int32": 4.0, "uint32": 4.0,
    "float16": 2.0, "bfloat16": 2.0, "int16": 2.0, "uint16": 2.0,
    "int8": 1.0, "uint8": 1.0, "bool": 1.0, "string": 16.0,
    "float8e4m3fn": 1.0, "float8e4m3fnuz": 1.0, "float8e5m2": 1.0, "float8e5m2fnuz": 1.0, "float8e8m0": 1.0,
    "float6e2m3": 0.75, "float6e3m2": 0.75,
    "int4": 0.5, "uint4": 0.5, "float4e2m1": 0.5, "int2": 0.25, "uint2": 0.25,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the graph: an input, an output, a weight or an activation."""

    name: str
    dtype: str  #: ONNX element type in lower case, ``"float32"``.
    shape: tuple[int, ...]  #: Sizes of all dimensions at the chosen batch.

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in memory, rounded up to whole bytes."""
        return int(-(-self.elements * _DTYPE_BYTES[self.dtype] // 1))


@dataclass(frozen=True, slots=True)
class Op:
    """A node of the ONNX graph."""

    name: str  #: Unique within the graph; made from type and position where the file has no name.
    #: ``op_type``, ``domain``: ``"Conv"``, ``""`` for ONNX's own domain.
    op_type: str
    domain: str
    #: ``inputs``, ``outputs``: Tensors of the node, without absent optional inputs.
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]  #: Constant inputs.
    attributes: Mapping[str, object]  #: Plain Python values; subgraphs and tensors by the hash of their bytes.
    flops: int | None  #: Floating-point operations, a multiply-add counted as two; None without a known formula.
    #: ``bytes_read``, ``bytes_written``: Compulsory traffic, with each input read once and each output written once; 0
    #: for views.
    bytes_read: int
    bytes_written: int
    launches: int = 1  #: Nodes executed in sequence: for a Loop or a Scan, its body in every iteration.

    @property
    def weight_bytes(self) -> int:
        """Bytes of the op's constant inputs."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def signature(self) -> str:
        """Hash of all that determines the cost of the op (op type, attributes, shapes, element types), 32 hex digits.

        Ops of equal signature are measured once, across models.
        """
        constant = {weight.name for weight in self.weights}
        # Without names: equal ops of different models have the same signature.
        fields = [
            self.domain,
            self.op_type,
            sorted((name, repr(value)) for name, value in self.attributes.items()),
            [(t.dtype, t.shape, t.name in constant) for t in self.inputs],
            [(t.dtype, t.shape) for t in self.outputs],
        ]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:32]


class HashedContent(Protocol):
    """Content of a file with a hash that may be computed later."""

    @property
    def sha256(self) -> str:
        """SHA-256 in hexadecimal digits. Raises `InputError` if the file can no longer be read."""


# No slots: ``cached_property`` stores its value in the instance's ``__dict__``.
@dataclass(frozen=True)
class ModelGraph:
    """A model at fixed sizes of the batch and of every other dimension.

    Attributes
    ----------
    name : str
        The file's stem, or the user's name for the model.
    batch : int
    ops : tuple of Op
        In topological order.
    inputs, outputs : tuple of Tensor
        Inputs and outputs of the graph, without weights.
    weights : tuple of Tensor
    opset : int
    path : str
        Path of the model's file.
    content : HashedContent or str
        Content of the file (external data included), or its hash.
    sizes : tuple of (str, int)
        Sizes of the inputs' free dimensions other than the batch, sorted.
    assumed : tuple of str
        Dimensions without a given size, at an assumed usual size.
    guessed : tuple of str
        Dimensions without a usual size: figures at the assumed size may be far from those in use.
    unread : str
        Reason why the ops are unknown without a run of the model; such a graph has only inputs and can only be
        measured. Empty: the ops are known.
    remarks : tuple of str
        Errors of the exporter tolerated by a runtime, such as an output declared with another shape.
    """

    name: str
    batch: int
    ops: tuple[Op, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    opset: int
    path: str
    content: HashedContent | str
    sizes: Sizes = ()
    assumed: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()
    unread: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Hash of the content; with gigabytes of weights, its computation takes time.

        Raises `InputError` if the file can no longer be read.
        """
        return self.content if isinstance(self.content, str) else self.content.sha256

    @property
    def sized_name(self) -> str:
        """Name followed by the sizes: ``"bert[seq=64]"``."""
        return sized_name(self.name, self.sizes)

    @cached_property
    def flops(self) -> int:
        """FLOPs of an inference at this batch, with 0 for ops without a formula."""
        return sum(op.flops or 0 for op in self.ops)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.bytes for weight in self.weights)

    @cached_property
    def uncounted_ops(self) -> tuple[str, ...]:
        """Op types in the graph without a known FLOP formula, sorted."""
        return tuple(sorted({op.op_type for op in self.ops if op.flops is None}))

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield (producer, consumer) positions in ``ops`` for every tensor between two ops."""
        producer = {tensor.name: i for i, op in enumerate(self.ops) for tensor in op.outputs}
        for i, op in enumerate(self.ops):
            for tensor in op.inputs:
                if tensor.name in producer:
                    yield producer[tensor.name], i
