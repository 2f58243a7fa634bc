"""Small networks built node by node, with kinds of layers absent from the zoo's published networks.

These networks follow no paper and have no published figures; they add variety, and need ``onnx`` only.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from onnx import ModelProto, TensorProto

from gpuprof.zoo.network import Network
from gpuprof.zoo.random_networks import draw_cnn, draw_mlp, draw_rnn, draw_transformer

_WORDS, _LENGTH = 4096, 64


def build_small_network(stem: str, seed: int = 0) -> ModelProto:
    """Return a small network by name, with random weights and a free batch."""
    return _BUILDERS[stem](Network(), seed)


def _build_mlp(net: Network, seed: int) -> ModelProto:
    x, widths = "input", (784, 2048, 2048, 1024)
    for features, outputs in pairwise(widths):
        x = net.add("Gemm", x, net.weight(outputs, features), net.weight(outputs), transB=1)
        x = net.add("Relu", x)
    net.add("Softmax", net.add("Gemm", x, net.weight(10, widths[-1]), net.weight(10), transB=1), axis=-1)
    return net.finish("mlp", TensorProto.FLOAT, ["batch", 784], ["batch", 10], seed)


def _build_encoder(net: Network, seed: int, width: int = 256, heads: int = 4, layers: int = 4) -> ModelProto:
    x = net.add("Gather", net.weight(_WORDS, width), "input_ids", axis=0)
    x = net.add("Add", x, net.weight(_LENGTH, width))
    for _ in range(layers):
        x = _add_layer_norm(net, net.add("Add", x, _add_attention(net, x, width, heads)), width)
        hidden = net.dense(x, width, 4 * width)
        gate = net.add("Sigmoid", hidden)
        x = _add_layer_norm(net, net.add("Add", x, net.dense(net.add("Mul", hidden, gate), 4 * width, width)), width)
    net.dense(net.add("ReduceMean", x, axes=[1], keepdims=0), width, 16)
    return net.finish("transformer_encoder", TensorProto.INT64, ["batch", _LENGTH], ["batch", 16], seed)


def _add_attention(net: Network, x: str, width: int, heads: int) -> str:
    split, join = net.constant(0, 0, heads, width // heads), net.constant(0, 0, width)
    q, k, v = (net.add("Reshape", net.dense(x, width, width), split) for _ in range(3))
    scores = net.add("MatMul", net.add("Transpose", q, perm=[0, 2, 1, 3]), net.add("Transpose", k, perm=[0, 2, 3, 1]))
    chances = net.add("Softmax", scores, axis=-1)
    mixed = net.add("MatMul", chances, net.add("Transpose", v, perm=[0, 2, 1, 3]))
    merged = net.add("Reshape", net.add("Transpose", mixed, perm=[0, 2, 1, 3]), join)
    return net.dense(merged, width, width)


def _add_layer_norm(net: Network, x: str, width: int) -> str:
    return net.add("LayerNormalization", x, net.weight(width), net.weight(width), axis=-1)


def _build_lstm(net: Network, seed: int, width: int = 256, layers: int = 2) -> ModelProto:
    x = net.add("Gather", net.weight(_WORDS, width), "input_ids", axis=0)
    x = net.add("Transpose", x, perm=[1, 0, 2])
    for _ in range(layers):
        weights = (net.weight(1, 4 * width, width), net.weight(1, 4 * width, width), net.weight(1, 8 * width))
        x = net.add("Squeeze", net.add("LSTM", x, *weights, hidden_size=width), net.constant(1))
    last = net.add(
        "Squeeze", net.add("Slice", x, net.constant(-1), net.constant(_LENGTH), net.constant(0)), net.constant(0)
    )
    net.dense(last, width, 16)
    return net.finish("lstm_classifier", TensorProto.INT64, ["batch", _LENGTH], ["batch", 16], seed)


def _build_unet(net: Network, seed: int, width: int = 32, depth: int = 3) -> ModelProto:
    x, skips = net.convolve("input", 3, width), []
    for level in range(depth):
        skips.append(x)
        x = net.convolve(x, width << level, width << level + 1, stride=2)
    for level in reversed(range(depth)):
        weight = net.weight(width << level + 1, width << level, 2, 2)
        x = net.add("ConvTranspose", x, weight, kernel_shape=[2, 2], strides=[2, 2])
        x = net.convolve(net.add("Concat", x, skips[level], axis=1), width << level + 1, width << level)
    net.add("Sigmoid", net.add("Conv", x, net.weight(1, width, 1, 1), kernel_shape=[1, 1]))
    return net.finish("unet", TensorProto.FLOAT, ["batch", 3, 128, 128], ["batch", 1, 128, 128], seed)


_BUILDERS: dict[str, Callable[[Network, int], ModelProto]] = {
    "mlp": _build_mlp,
    "transformer_encoder": _build_encoder,
    "lstm_classifier": _build_lstm,
    "unet": _build_unet,
    "random_cnn": draw_cnn,
    "random_transformer": draw_transformer,
    "random_rnn": draw_rnn,
    "random_mlp": draw_mlp,
}
