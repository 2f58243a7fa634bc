"""Random transformers, recurrent networks and perceptrons, for the same purpose as `gpuprof.zoo.random_cnns`."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from onnx import ModelProto, TensorProto

from gpuprof.zoo.architecture import read_zoo
from gpuprof.zoo.network import Network

_CHOICES = read_zoo()["random_sequence"]
_WORDS: int = _CHOICES["words"]


class _RandomSequenceNet:
    """A network, the random numbers that decide its layers, and the forms of its functions."""

    def __init__(self, net: Network, seed: int) -> None:
        self.net, self.random = net, np.random.default_rng(seed)
        self.activation = str(self.random.choice(["gelu", "gelu", "tanh gelu", "Relu", "silu"]))
        self.fused_norm = self.random.random() < 0.6
        self.biased = self.random.random() < 0.8

    def pick(self, *values: int) -> int:
        """Return a random element of ``values``."""
        return int(self.random.choice(values))

    def dense(self, x: str, features: int, outputs: int) -> str:
        """Multiply the last axis by a matrix, and add a bias if the network has biases."""
        if self.biased:
            return self.net.dense(x, features, outputs)
        return self.net.add("MatMul", x, self.net.weight(features, outputs))

    def activate(self, x: str) -> str:
        """Apply the activation, in the ops that exporters write."""
        net = self.net
        if self.activation == "silu":
            return net.add("Mul", x, net.add("Sigmoid", x))
        if self.activation == "gelu":
            bell = net.add("Add", net.add("Erf", net.add("Div", x, net.scalar(2**0.5))), net.scalar(1.0))
            return net.add("Mul", net.add("Mul", x, bell), net.scalar(0.5))
        if self.activation == "tanh gelu":
            # GELU's approximation by tanh (Hendrycks and Gimpel, 2016, section 2).
            cube = net.add("Mul", net.add("Pow", x, net.scalar(3.0)), net.scalar(0.044715))
            bell = net.add("Tanh", net.add("Mul", net.add("Add", x, cube), net.scalar((2 / np.pi) ** 0.5)))
            return net.add("Mul", net.add("Mul", x, net.scalar(0.5)), net.add("Add", bell, net.scalar(1.0)))
        return net.add(self.activation, x)

    def normalise(self, x: str, width: int) -> str:
        """Normalise the last axis, by a single op or by the ops that older exporters write."""
        net = self.net
        if self.fused_norm:
            return net.add("LayerNormalization", x, net.weight(width), net.weight(width), axis=-1)
        centred = net.add("Sub", x, net.add("ReduceMean", x, axes=[-1], keepdims=1))
        square = net.add("ReduceMean", net.add("Pow", centred, net.scalar(2.0)), axes=[-1], keepdims=1)
        scaled = net.add("Div", centred, net.add("Sqrt", net.add("Add", square, net.scalar(1e-5))))
        return net.add("Add", net.add("Mul", scaled, net.weight(width)), net.weight(width))


def draw_transformer(net: Network, seed: int) -> ModelProto:
    """Return an encoder; the seed decides width, heads, layers, length, and the forms of its functions."""
    model = _RandomSequenceNet(net, seed)
    width, length = model.pick(*_CHOICES["widths"]), model.pick(*_CHOICES["lengths"])
    heads, ratio, first = width // model.pick(32, 64), model.pick(2, 3, 4), model.random.random() < 0.5
    x = net.add("Gather", net.weight(_WORDS, width), "input_ids", axis=0)
    x = net.add("Add", x, net.weight(length, width))
    for _ in range(model.pick(1, 2, 3)):
        for part in (_add_attention, _add_feed_forward):
            size = heads if part is _add_attention else ratio * width
            if first:
                x = net.add("Add", x, part(model, model.normalise(x, width), width, size))
            else:
                x = model.normalise(net.add("Add", x, part(model, x, width, size)), width)
    classes = model.pick(2, 16, 1000)
    model.dense(net.add("ReduceMean", x, axes=[1], keepdims=0), width, classes)
    return net.finish("random_transformer", TensorProto.INT64, ["batch", length], ["batch", classes], seed)


def _add_feed_forward(model: _RandomSequenceNet, x: str, width: int, hidden: int) -> str:
    return model.dense(model.activate(model.dense(x, width, hidden)), hidden, width)


def _add_attention(model: _RandomSequenceNet, x: str, width: int, heads: int) -> str:
    net, depth = model.net, width // heads
    split, join = net.constant(0, 0, heads, depth), net.constant(0, 0, heads * depth)
    q, k, v = (net.add("Reshape", model.dense(x, width, heads * depth), split) for _ in range(3))
    q, v = (net.add("Transpose", projected, perm=[0, 2, 1, 3]) for projected in (q, v))
    scores = net.add("MatMul", q, net.add("Transpose", k, perm=[0, 2, 3, 1]))
    chances = net.add("Softmax", net.add("Div", scores, net.scalar(depth**0.5)), axis=-1)
    mixed = net.add("Transpose", net.add("MatMul", chances, v), perm=[0, 2, 1, 3])
    return model.dense(net.add("Reshape", mixed, join), heads * depth, width)


def draw_rnn(net: Network, seed: int) -> ModelProto:
    """Return LSTM or GRU layers over words; the seed decides their kind, number, width and length."""
    model = _RandomSequenceNet(net, seed)
    kind, gates = ("LSTM", 4) if model.random.random() < 0.6 else ("GRU", 3)
    width, length = model.pick(64, 128, 192, 256, 384, 512), model.pick(16, 32, 64)
    x = net.add("Gather", net.weight(_WORDS, width), "input_ids", axis=0)
    x = net.add("Transpose", x, perm=[1, 0, 2])
    for _ in range(model.pick(1, 2)):
        weights = (net.weight(1, gates * width, width), net.weight(1, gates * width, width))
        # Each gate has two biases, for the input and for the state (ONNX operators LSTM and GRU, input B).
        x = net.add(kind, x, *weights, net.weight(1, 2 * gates * width), hidden_size=width)
        x = net.add("Squeeze", x, net.constant(1))
    model.dense(net.add("ReduceMean", x, axes=[0], keepdims=0), width, 16)
    return net.finish("random_rnn", TensorProto.INT64, ["batch", length], ["batch", 16], seed)


def draw_mlp(net: Network, seed: int) -> ModelProto:
    """Return dense layers with an activation between them; the seed decides their number and widths."""
    model = _RandomSequenceNet(net, seed)
    widths = [model.pick(64, 128, 256, 512, 784, 1024, 2048, 4096) for _ in range(model.pick(3, 4, 5, 6))]
    x = "input"
    for features, outputs in pairwise(widths):
        x = net.add("Gemm", x, net.weight(outputs, features), net.weight(outputs), transB=1)
        x = model.activate(x)
    net.add("Gemm", x, net.weight(10, widths[-1]), net.weight(10), transB=1)
    return net.finish("random_mlp", TensorProto.FLOAT, ["batch", widths[0]], ["batch", 10], seed)
