"""A model as a graph of ops with shapes, FLOPs and bytes at one batch size."""

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
    shape: tuple[int, ...]  #: With the batch bound; every dimension known.

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

    name: str  #: Unique within its graph; made from type and position where the file gives none.
    #: ``op_type``, ``domain``: ``"Conv"``, ``""`` for ONNX's own domain.
    op_type: str
    domain: str
    #: ``inputs``, ``outputs``: Absent optional inputs are left out.
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]  #: The inputs that are constants of the model.
    attributes: Mapping[str, object]  #: Plain Python values; subgraphs and tensors by the hash of their bytes.
    flops: int | None  #: Floating-point operations, a multiply-add counting two; None where no formula is known.
    #: ``bytes_read``, ``bytes_written``: Compulsory traffic: each input read once, each output written once; 0 for
    #: views.
    bytes_read: int
    bytes_written: int
    launches: int = 1  #: Nodes that run one after another for it: of a Loop or a Scan those of its body, every turn.

    @property
    def weight_bytes(self) -> int:
        """Bytes of the op's constant inputs."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def signature(self) -> str:
        """Hash of everything that decides what the op costs: type, attributes, shapes and types.

        Equal signatures are measured once, across models. 32 hexadecimal digits.
        """
        constant = {weight.name for weight in self.weights}
        # No names: equal ops of different models are to have one signature.
        fields = [
            self.domain,
            self.op_type,
            sorted((name, repr(value)) for name, value in self.attributes.items()),
            [(t.dtype, t.shape, t.name in constant) for t in self.inputs],
            [(t.dtype, t.shape) for t in self.outputs],
        ]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:32]


class HashedContent(Protocol):
    """Content of a file whose hash may still be computed."""

    @property
    def sha256(self) -> str:
        """In hexadecimal digits. Raises `InputError` if the file can no longer be read."""


# No slots: ``cached_property`` keeps what it has computed in the instance's ``__dict__``.
@dataclass(frozen=True)
class ModelGraph:
    """A model at one batch size and one size of each other dimension.

    Attributes
    ----------
    name : str
        The file's stem, or what the user called it.
    batch : int
    ops : tuple of Op
        In topological order.
    inputs, outputs : tuple of Tensor
        Of the graph, without its weights.
    weights : tuple of Tensor
    opset : int
    path : str
        The file it was read from.
    content : HashedContent or str
        What it holds (external data included), or the hash of that.
    sizes : tuple of (str, int)
        Of the free dimensions of its inputs beside the batch, sorted.
    assumed : tuple of str
        Those of them without a given size, for which a usual one is assumed.
    guessed : tuple of str
        Those without a usual size: figures at the assumed one may be far from those in use.
    unread : str
        Why its ops cannot be known without running it; then it has its inputs alone, and can only be measured. Empty:
        they are known.
    remarks : tuple of str
        Slips of the exporter that a runtime tolerates, such as an output declared with another shape.
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
        """The hash of the content, which gigabytes of weights are to be waited for.

        Raises `InputError` if the file can no longer be read.
        """
        return self.content if isinstance(self.content, str) else self.content.sha256

    @property
    def sized_name(self) -> str:
        """The name with the sizes behind it: ``"bert[seq=64]"``."""
        return sized_name(self.name, self.sizes)

    @cached_property
    def flops(self) -> int:
        """FLOPs of one inference at this batch, ops without a formula counted as 0."""
        return sum(op.flops or 0 for op in self.ops)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.bytes for weight in self.weights)

    @cached_property
    def uncounted_ops(self) -> tuple[str, ...]:
        """Op types present for which no FLOP formula is known, sorted."""
        return tuple(sorted({op.op_type for op in self.ops if op.flops is None}))

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield (producer, consumer) positions in ``ops`` for every tensor that flows between two ops."""
        producer = {tensor.name: i for i, op in enumerate(self.ops) for tensor in op.outputs}
        for i, op in enumerate(self.ops):
            for tensor in op.inputs:
                if tensor.name in producer:
                    yield producer[tensor.name], i
