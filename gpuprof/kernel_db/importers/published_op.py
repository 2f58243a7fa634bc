"""Published measurements of ops, given by sizes alone, as ONNX ops of the same sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from gpuprof.domain.model import Op, Tensor
from gpuprof.graph.op_costs import cost_of
from gpuprof.kernel_db.schema import PER_OP, OpRow, RunRow

Sizes = Mapping[str, int]

#: The ONNX op of each element-wise op that NeuSight measured; ``u`` at the end: with a number.
_BINARY = MappingProxyType({"add": "Add", "mul": "Mul", "div": "Div", "pow": "Pow"})
_UNARY = MappingProxyType({"relu": "Relu", "gelu": "Gelu", "tanh": "Tanh"})


def describe_op(kind: str, sizes: Sizes, dtype: str) -> Op:
    """Return the ONNX op that a published row is of.

    Raises `KeyError` when the kind is none of these or a size is missing. ``kind``: ``linear``, ``bmm``, ``conv``,
    ``ln``, ``softmax``, an element-wise op of NeuSight's, or ``attention``; ``sizes``: by the names of the
    publication's columns in lower case; ``dtype``: of all tensors.
    """
    if kind in _FORMS:
        op_type, shapes, outputs, attributes, weights = _FORMS[kind](sizes)
    else:
        op_type, shapes, outputs, attributes, weights = _element_wise(kind, sizes)
    inputs = tuple(Tensor(f"x{i}", dtype, shape) for i, shape in enumerate(shapes))
    results = tuple(Tensor(f"y{i}", dtype, shape) for i, shape in enumerate(outputs))
    cost = cost_of(op_type, "", inputs, results, attributes)
    constant = tuple(inputs[i] for i in weights)
    return Op(kind, op_type, "", inputs, results, constant, attributes, cost.flops, cost.bytes_read, cost.bytes_written)


def op_row(run: RunRow, op: Op, batch: int, latency_ms: float, execution: str, note: str | None = None) -> OpRow:
    """Return the row of an op measured alone."""
    nanoseconds = round(latency_ms * 1e6)
    return OpRow(
        run_id=run.run_id,
        model=PER_OP,
        device=run.device,
        batch=batch,
        position=0,
        name=op.name,
        op_type=op.op_type,
        signature=op.signature,
        shapes=",".join(map(_shape, op.inputs)) + "->" + ",".join(map(_shape, op.outputs)),
        dtype=op.inputs[0].dtype,
        attributes=json.dumps(dict(op.attributes), sort_keys=True),
        flops=op.flops,
        bytes_read=op.bytes_read,
        bytes_written=op.bytes_written,
        weight_bytes=op.weight_bytes,
        duration_mean_ns=nanoseconds,
        runtime=run.runtime,
        execution=execution,
        precision=run.precision,
        note=note,
    )


_Shape = tuple[int, ...]
_Form = tuple[str, Sequence[_Shape], Sequence[_Shape], Mapping[str, object], Sequence[int]]


def _linear(s: Sizes) -> _Form:
    rows = s["b"] * s["m"]
    return "Gemm", [(rows, s["k"]), (s["n"], s["k"]), (s["n"],)], [(rows, s["n"])], {"transB": 1}, (1, 2)


def _bmm(s: Sizes) -> _Form:
    return "MatMul", [(s["b"], s["m"], s["k"]), (s["b"], s["k"], s["n"])], [(s["b"], s["m"], s["n"])], {}, ()


def _gemm(s: Sizes) -> _Form:
    return "MatMul", [(s["m"], s["k"]), (s["k"], s["n"])], [(s["m"], s["n"])], {}, (1,)


def _conv(s: Sizes) -> _Form:
    kernel, size, stride, padding = s["kernel_size"], s["input_size"], s["stride"], s["padding"]
    out = (size + 2 * padding - kernel) // stride + 1
    attributes = {"kernel_shape": [kernel] * 2, "pads": [padding] * 4, "strides": [stride] * 2}
    shapes = [(s["b"], s["in_channels"], size, size), (s["out_channels"], s["in_channels"], kernel, kernel)]
    return "Conv", shapes, [(s["b"], s["out_channels"], out, out)], attributes, (1,)


def _layer_norm(s: Sizes) -> _Form:
    shape = (s["b"], s["h"])
    return "LayerNormalization", [shape, (s["h"],), (s["h"],)], [shape], {"axis": -1}, (1, 2)


def _softmax(s: Sizes) -> _Form:
    return "Softmax", [(s["b"], s["h"])], [(s["b"], s["h"])], {"axis": -1}, ()


def _attention(s: Sizes) -> _Form:
    query = (s["b"], s["heads"], s["queries"], s["head_size"])
    key = (s["b"], s["key_heads"], s["keys"], s["head_size"])
    attributes = {"is_causal": s["causal"]} | ({"window": s["window"]} if s["window"] else {})
    return "Attention", [query, key, key], [query], attributes, ()


_FORMS: Mapping[str, Callable[[Sizes], _Form]] = MappingProxyType(
    {
        "linear": _linear,
        "bmm": _bmm,
        "gemm": _gemm,
        "conv": _conv,
        "ln": _layer_norm,
        "softmax": _softmax,
        "attention": _attention,
    }
)


def _element_wise(kind: str, s: Sizes) -> _Form:
    shape = (s["b"], s["h"])
    if kind in _UNARY:
        return _UNARY[kind], [shape], [shape], {}, ()
    second = () if kind.endswith("u") else shape
    return _BINARY[kind.removesuffix("u")], [shape, second], [shape], {}, ()


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))
