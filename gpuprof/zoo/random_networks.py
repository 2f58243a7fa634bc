"""Random networks (convolutional, transformers, recurrent, dense): layers of every common kind in new combinations.

Regressors trained on published networks only see few layer shapes; random networks cover the range between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from onnx import ModelProto, TensorProto

from gpuprof.zoo.architecture import read_zoo
from gpuprof.zoo.network import Network

_CNN = read_zoo()["random_cnn"]
_MOST_CHANNELS: int = _CNN["most_channels"]


@dataclass(frozen=True, slots=True)
class _FeatureMap:
    """A feature map: the tensor's name, number of channels, and side in pixels."""

    name: str
    channels: int
    side: int


class _RandomNetwork:
    """A network and the random numbers that decide its layers."""

    def __init__(self, net: Network, seed: int) -> None:
        self.net, self.random = net, np.random.default_rng(seed)

    def pick(self, *values: int) -> int:
        """Return a random element of ``values``."""
        return int(self.random.choice(values))


class _RandomCnn(_RandomNetwork):
    """A network and the random numbers that decide its layers.

    Attributes
    ----------
    flops : float
        FLOPs of the convolutions so far, per image.
    """

    def __init__(self, net: Network, seed: int) -> None:
        super().__init__(net, seed)
        self.flops = 0.0
        self.activation = str(self.random.choice(["Relu", "Relu", "Clip", "HardSwish", "silu", "LeakyRelu"]))
        self.normalised = self.random.random() < 0.8

    def conv(
        self, x: _FeatureMap, channels: int, side: int, stride: int = 1, group: int = 1, active: bool = True
    ) -> _FeatureMap:
        """Convolve by side × side, with batch normalisation or a bias, and activate."""
        weight = self.net.weight(channels, x.channels // group, side, side)
        bias = () if self.normalised else (self.net.weight(channels),)
        window = {"kernel_shape": [side] * 2, "pads": [side // 2] * 4, "strides": [stride] * 2, "group": group}
        name = self.net.add("Conv", x.name, weight, *bias, **window)
        if self.normalised:
            name = self.net.add("BatchNormalization", name, *(self.net.weight(channels) for _ in range(4)))
        side_out = (x.side - 1) // stride + 1
        self.flops += 2.0 * side_out * side_out * channels * x.channels // group * side * side
        feature_map = _FeatureMap(name, channels, side_out)
        return self.activate(feature_map) if active else feature_map

    def activate(self, x: _FeatureMap) -> _FeatureMap:
        """Apply the network's activation."""
        if self.activation == "silu":
            return replace(x, name=self.net.add("Mul", x.name, self.net.add("Sigmoid", x.name)))
        if self.activation == "Clip":
            return replace(x, name=self.net.add("Clip", x.name, self.net.scalar(0.0), self.net.scalar(6.0)))
        return replace(x, name=self.net.add(self.activation, x.name))

    def pool(self, x: _FeatureMap, op_type: str = "MaxPool", stride: int = 2) -> _FeatureMap:
        """Pool by 3×3, or at random by 2×2 if the stride is 2 and the side even."""
        side = 2 if stride == 2 and x.side % 2 == 0 and self.random.random() < 0.5 else 3
        window = {"kernel_shape": [side] * 2, "pads": [side // 2 if side == 3 else 0] * 4, "strides": [stride] * 2}
        return _FeatureMap(self.net.add(op_type, x.name, **window), x.channels, (x.side - 1) // stride + 1)

    def add(self, x: _FeatureMap, y: _FeatureMap) -> _FeatureMap:
        """Add two maps of equal shape."""
        return replace(x, name=self.net.add("Add", x.name, y.name))

    def concat(self, *maps: _FeatureMap) -> _FeatureMap:
        """Concatenate the channels of maps of equal size."""
        name = self.net.add("Concat", *(x.name for x in maps), axis=1)
        return _FeatureMap(name, sum(x.channels for x in maps), maps[0].side)


def draw_cnn(net: Network, seed: int) -> ModelProto:
    """Return a network of 50 million to 3 billion FLOPs an image or a little more; the seed decides its layers."""
    cnn = _RandomCnn(net, seed)
    # The budget is log-uniform; a uniform budget would put most networks near the upper end.
    budget = float(np.exp(cnn.random.uniform(*np.log(_CNN["flops"]))))
    side = cnn.pick(*_CNN["sides"])
    x = cnn.conv(_FeatureMap("input", 3, side), cnn.pick(*_CNN["widths"]), cnn.pick(3, 3, 5, 7), stride=2)
    x = cnn.pool(x) if cnn.random.random() < 0.5 else x
    kinds = cnn.random.choice(len(_BLOCKS), size=cnn.pick(1, 2, 3), replace=False)
    # The number of nodes is bounded, because thin layers may never reach the budget.
    while cnn.flops < budget and len(net.nodes) < 150:
        for _ in range(cnn.pick(1, 2, 3, 4)):
            x = _BLOCKS[int(cnn.random.choice(kinds))](cnn, x)
        x = _downsample(cnn, x)
    classes = _add_head(cnn, x)
    return net.finish("random_cnn", TensorProto.FLOAT, ["batch", 3, side, side], ["batch", classes], seed)


def _downsample(cnn: _RandomCnn, x: _FeatureMap) -> _FeatureMap:
    """Halve the side if at least 6 pixels, and increase the channels."""
    channels = min(_MOST_CHANNELS, round(x.channels * cnn.random.uniform(1.3, 2.2) / 8) * 8 or 8)
    if x.side < 6:
        return cnn.conv(x, channels, 1)
    how = cnn.pick(0, 1, 2)
    if how == 0:
        return cnn.conv(x, channels, cnn.pick(1, 3), stride=2)
    return cnn.conv(cnn.pool(x, "MaxPool" if how == 1 else "AveragePool"), channels, cnn.pick(1, 3))


def _add_head(cnn: _RandomCnn, x: _FeatureMap) -> int:
    """Add a classifier on channel means or on all pixels; return the number of classes."""
    classes = cnn.pick(10, 100, 365, 1000)
    features = x.channels
    if x.side <= 8 and cnn.random.random() < 0.3:
        features, hidden = x.channels * x.side**2, cnn.pick(256, 512, 1024)
        name = cnn.net.add("Flatten", x.name)
        name = cnn.net.add("Gemm", name, cnn.net.weight(hidden, features), cnn.net.weight(hidden), transB=1)
        name, features = cnn.net.add("Relu", name), hidden
    else:
        name = cnn.net.add("Flatten", cnn.net.add("GlobalAveragePool", x.name))
    cnn.net.add("Gemm", name, cnn.net.weight(classes, features), cnn.net.weight(classes), transB=1)
    return classes


def _add_plain(cnn: _RandomCnn, x: _FeatureMap) -> _FeatureMap:
    return cnn.conv(x, x.channels, cnn.pick(3, 3, 5))


def _add_bottleneck(cnn: _RandomCnn, x: _FeatureMap) -> _FeatureMap:
    width = max(8, x.channels // cnn.pick(2, 4))
    y = cnn.conv(cnn.conv(x, width, 1), width, 3)
    return cnn.activate(cnn.add(x, cnn.conv(y, x.channels, 1, active=False)))


def _add_basic(cnn: _RandomCnn, x: _FeatureMap) -> _FeatureMap:
    y = cnn.conv(cnn.conv(x, x.channels, 3), x.channels, 3, active=False)
    return cnn.activate(cnn.add(x, y))


def _add_inverted_residual(cnn: _RandomCnn, x: _FeatureMap) -> _FeatureMap:
    width = min(_MOST_CHANNELS, x.channels * cnn.pick(2, 3, 4, 6))
    y = cnn.conv(cnn.conv(x, width, 1), width, cnn.pick(3, 3, 5), group=width)
    if cnn.random.random() < 0.4:
        y = _add_squeeze_and_excite(cnn, y)
    return cnn.add(x, cnn.conv(y, x.channels, 1, active=False))


def _add_squeeze_and_excite(cnn: _RandomCnn, x: _FeatureMap) -> _FeatureMap:
    """Scale the channels by gates computed from their means (squeeze and excitation)."""
    mean = _FeatureMap(cnn.net.add("GlobalAveragePool", x.name), x.channels, 1)
    squeezed = cnn.conv(mean, max(4, x.channels // 16), 1)
    weights = cnn.net.add("Sigmoid", cnn.conv(squeezed, x.channels, 1, active=False).name)
    return replace(x, name=cnn.net.add("Mul", x.name, weights))


def _add_grouped_convolution(cnn: _RandomCnn, x: _FeatureMap) -> _FeatureMap:
    group = cnn.pick(2, 4, 8)
    return cnn.conv(x, x.channels, 3, group=group) if x.channels % group == 0 else _add_plain(cnn, x)


def _add_dense(cnn: _RandomCnn, x: _FeatureMap) -> _FeatureMap:
    growth = cnn.pick(12, 24, 32)
    y = cnn.conv(cnn.conv(x, 4 * growth, 1), growth, 3)
    return cnn.concat(x, y) if x.channels + growth <= _MOST_CHANNELS else cnn.conv(x, x.channels, 1)


def _add_inception(cnn: _RandomCnn, x: _FeatureMap) -> _FeatureMap:
    part = max(8, x.channels // 4)
    branch3 = cnn.conv(cnn.conv(x, max(8, part // 2), 1), part, 3)
    branch5 = cnn.conv(cnn.conv(x, max(8, part // 4), 1), part, 5)
    pool_branch = cnn.conv(cnn.pool(x, stride=1), part, 1)
    return cnn.concat(cnn.conv(x, part, 1), branch3, branch5, pool_branch)


def _add_fire(cnn: _RandomCnn, x: _FeatureMap) -> _FeatureMap:
    squeeze = cnn.conv(x, max(8, x.channels // 8), 1)
    return cnn.concat(cnn.conv(squeeze, max(8, x.channels // 2), 1), cnn.conv(squeeze, max(8, x.channels // 2), 3))


_BLOCKS = (
    _add_plain,
    _add_basic,
    _add_bottleneck,
    _add_inverted_residual,
    _add_grouped_convolution,
    _add_dense,
    _add_inception,
    _add_fire,
)


_SEQUENCE = read_zoo()["random_sequence"]
_WORDS: int = _SEQUENCE["words"]


class _RandomSequenceNet(_RandomNetwork):
    """A network, the random numbers that decide its layers, and the forms of its functions."""

    def __init__(self, net: Network, seed: int) -> None:
        super().__init__(net, seed)
        self.activation = str(self.random.choice(["gelu", "gelu", "tanh gelu", "Relu", "silu"]))
        self.fused_norm = self.random.random() < 0.6
        self.biased = self.random.random() < 0.8

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
    width, length = model.pick(*_SEQUENCE["widths"]), model.pick(*_SEQUENCE["lengths"])
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
