"""Odd models: what ONNX allows and few exporters write, and what is left of a file when something went wrong."""

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import ModelProto, helper, numpy_helper, parser

Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class OddModel:
    """A model file that few exporters write."""

    name: str
    build: Callable[[Path], object]  #: Writes the model to the path.
    dims: Mapping[str, int] = field(default_factory=dict)  #: Sizes of free dimensions without a usual size.


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _parse(text: str, weights: Weights, opset: int, domains: str = "", ir_version: int = 10) -> ModelProto:
    model = parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}{domains}]> model {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


def _write(text: str, weights: Weights, opset: int, domains: str, path: Path) -> None:
    onnx.save(_parse(text, weights, opset, domains, 13 if opset > 23 else 10), path)


def _kind(
    name: str, text: str, weights: Weights | None = None, opset: int = 17, domains: str = "", **dims: int
) -> OddModel:
    return OddModel(name, partial(_write, text, weights or {}, opset, domains), dims)


_MICROSOFT, _ML = ', "com.microsoft": 1', ', "ai.onnx.ml": 3'
_W = {"w": _random(16, 8)}

#: Inputs and outputs as few exporters declare them.
_INPUTS = (
    _kind("no input's shape", "(float[] x) => (float[] y) { y = MatMul(x, w) }", _W),
    _kind("unnamed free dimensions", "(float[?, ?, 16] x) => (float[?, ?, 8] y) { y = MatMul(x, w) }", _W),
    _kind("scalar input", "(float[N, 16] x, float scale) => (float[N, 16] y) { y = Mul(x, scale) }"),
    _kind("scalar input alone", "(float x) => (float y) { y = Exp(x) }"),
    _kind("input of no elements", "(float[N, 0] x) => (float[N, 0] y) { y = Relu(x) }"),
    _kind("no input", "() => (float[4] y) { y = Relu(b) }", {"b": _random(4)}),
    _kind("input that nothing reads", "(float[N, 16] x, float[N, 4] z) => (float[N, 8] y) { y = MatMul(x, w) }", _W),
    _kind("output that is an input", "(float[N, 16] x) => (float[N, 16] x, float[N, 8] y) { y = MatMul(x, w) }", _W),
    _kind("spectrum", "(float[N, 512, 1] x) => (float[N, 512, 2] y) { y = DFT<axis=1>(x) }"),
    _kind("complex input", "(complex64[N, 4] x) => (complex64[N, 4] y) { y = Identity(x) }"),
    _kind("float8 input", "(float8e4m3fn[N, 4] x) => (float[N, 4] y) { y = Cast<to=1>(x) }", opset=19),
    _kind("int4 input", "(int4[N, 4] x) => (float[N, 4] y) { y = Cast<to=1>(x) }", opset=21),
    _kind("optional input", "(optional(float[N, 16]) x) => (float[N, 16] y) { y = OptionalGetElement(x) }", opset=18),
    _kind("texts joined", '(string[N] a, string[N] b) => (string[N] c) { c = StringConcat(a, b) }', opset=20),
    _kind("two batches that must agree", "(float[N, 16] x, float[M, 16] z) => (float[N, 16] y) { y = Add(x, z) }"),
)  # fmt: skip

#: Control flow, shapes that the data decide, and ops that are not the same for each item or each time.
_FLOW = (
    _kind("Loop until the data say so", "(float[N, 16] x) => (float[N, 16] y) { y = Loop(none, yes, x) "
          "<body = one (int64 i, bool go, float[N, 16] s) => (bool on, float[N, 16] t) "
          "{ t = Mul(s, half) m = ReduceMax<keepdims=0>(t) on = Greater(m, low) }> }",
          {"none": np.array(100), "yes": np.array(True), "half": np.array(0.5, np.float32),
           "low": np.array(0.1, np.float32)}),
    _kind("If of two shapes", "(float[N, 16] x) => (float[N, M] y) { s = ReduceSum<keepdims=0>(x) c = Greater(s, zero) "
          "y = If(c) <then_branch = a () => (float[N, 8] t) { t = MatMul(x, w) }, "
          "else_branch = b () => (float[N, 16] e) { e = Relu(x) }> }", {**_W, "zero": np.array(0, np.float32)}),
    _kind("sequence within", "(float[N, 16] x) => (float[N, 16] y) { s = SplitToSequence<axis=1>(x, four) "
          "y = ConcatFromSequence<axis=1>(s) }", {"four": np.array(4)}),
    _kind("output as long as the data say", "(float[N, 16] x) => (int64[2, K] y) { y = NonZero(x) }"),
    _kind("Unique", "(int64[N, 16] x) => (int64[K] y) { y = Unique(x) }"),
    _kind("more memory than there is", "(float[N, 16] x) => (float[A, B, C] y) { e = Expand(x, size) "
          "y = ReduceSum(e) }", {"size": np.array([1 << 20, 1 << 20, 16])}),
)  # fmt: skip

#: Types, ops and versions.
_OPS = (
    _kind("int4 weights", "(float[N, 16] x) => (float[N, 8] y) { d = DequantizeLinear(q, s) y = MatMul(x, d) }",
          {"q": np.tile(np.array([1, -2], ml_dtypes.int4), (16, 4)), "s": np.array(0.5, np.float32)}, opset=21),
    _kind("float8 weights", "(float[N, 16] x) => (float[N, 8] y) { c = Cast<to=17>(w) d = DequantizeLinear(c, s) "
          "y = MatMul(x, d) }", {**_W, "s": np.array(0.5, np.float32)}, opset=19),
    _kind("4-bit product of the runtime's own", "(float[N, 32] x) => (float[N, 8] y) "
          "{ y = com.microsoft.MatMulNBits<K=32, N=8, bits=4, block_size=32>(x, q, s) }",
          {"q": np.full((8, 1, 16), 0x53, np.uint8), "s": np.ones(8, np.float32)}, domains=_MICROSOFT),
    _kind("fused attention of the runtime's own", "(float[N, S, 16] x) => (float[N, S, 16] y) "
          "{ y = com.microsoft.Attention<num_heads=2>(x, w, b) }", {"w": _random(16, 48), "b": _random(48)},
          domains=_MICROSOFT, S=12),
    _kind("attention to a cache, of opset 23", "(float[N, 2, S, 8] q, float[N, 2, S, 8] k, float[N, 2, S, 8] v, "
          "float[N, 2, P, 8] past_key, float[N, 2, P, 8] past_value) => (float[N, 2, S, 8] y, float[N, 2, T, 8] a, "
          "float[N, 2, T, 8] b) { y, a, b = Attention(q, k, v, , past_key, past_value) }", opset=23, S=4, P=12),
    _kind("half-precision weights of a float32 input", "(float[N, 16] x) => (float[N, 16] y) "
          "{ y = LayerNormalization(x, w) }", {"w": _random(16).astype(np.float16)}),
    _kind("op that does not exist", "(float[N, 16] x) => (float[N, 16] y) { y = Reluu(x) }"),
    _kind("opset of the future", "(float[N, 16] x) => (float[N, 16] y) { y = Relu(x) }", opset=99),
    _kind("labels of texts", '(string[N, 1] x) => (int64[N, 1] y) { y = ai.onnx.ml.LabelEncoder'
          '<keys_strings = ["a", "b"], values_int64s = [1, 2]>(x) }', domains=_ML),
)  # fmt: skip


def _change(text: str, weights: Weights, change: Callable[[ModelProto], object], path: Path) -> None:
    """Write a model after something was done to it."""
    model = _parse(text, weights, 17)
    change(model)
    path.write_bytes(model.SerializeToString())


_PLAIN = "(float[N, 16] x) => (float[N, 8] y) { h = Relu(x) y = MatMul(h, w) }"


def _rename(model: ModelProto) -> None:
    model.graph.input[0].name = model.graph.node[0].input[0] = "serving default/input: 0"
    model.graph.output[0].name = model.graph.node[1].output[0] = "out put|0"


def _make_damaged(name: str, change: Callable[[ModelProto], object]) -> OddModel:
    return OddModel(name, partial(_change, _PLAIN, _W, change))


def _compress(path: Path) -> None:
    path.write_bytes(gzip.compress(_parse(_PLAIN, _W, 17).SerializeToString()))


def _write_runtime_format(path: Path) -> None:
    """Write the format of ONNX Runtime's own, under the name of the other."""
    import onnxruntime as ort

    plain = path.with_name(f"{path.stem}-plain.onnx")
    _change(_PLAIN, _W, lambda model: None, plain)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path.with_suffix(".ort"))
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(plain, options, providers=["CPUExecutionProvider"])
    path.with_suffix(".ort").replace(path)


def _write_sparse(path: Path) -> None:
    model = _parse(_PLAIN, {}, 17)
    values = numpy_helper.from_array(np.ones(3, np.float32), "w")
    indices = numpy_helper.from_array(np.array([3, 17, 90]), "w_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [16, 8]))
    onnx.save(model, path)


def _forget_opset(model: ModelProto) -> None:
    del model.opset_import[:]


def _make_free(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1


#: Files that something happened to.
_FILES = (
    _make_damaged("spaces, colons and bars in names", _rename),
    _make_damaged("free batch written as -1", _make_free),
    _make_damaged("no opset", _forget_opset),
    OddModel("compressed file", _compress),
    OddModel("ONNX Runtime's own format", _write_runtime_format),
    OddModel("sparse weights", _write_sparse),
)  # fmt: skip

ODD = (*_INPUTS, *_FLOW, *_OPS, *_FILES)
