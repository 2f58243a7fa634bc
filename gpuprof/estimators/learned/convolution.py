"""ONNX Runtime's execution of a convolution on a CPU, and its cost besides the arithmetic.

There are two ways: in blocks of channels as wide as the vector registers, incomplete blocks filled with zeros; or,
where channels cannot be blocked, by unfolding the input into a matrix (im2col), written and read again, and
multiplying. The channels alone decide between them; the rules are those observed of its optimizer (1.31, vectors of 512
bits).
"""

from __future__ import annotations

from math import prod

from gpuprof.estimators.learned.op_facts import OpFacts, integer, integers

#: Channels per block.
LANES = 16
#: Input channels are padded to whole blocks where they are a multiple of this.
_FILLED = 4


def is_blocked(facts: OpFacts) -> bool:
    """Return whether an op is a two-dimensional convolution computed in a channel-blocked layout."""
    if not _is_convolution(facts):
        return False
    group, outputs, inputs = _channels(facts)
    if group == 1:
        return inputs < LANES or inputs % _FILLED == 0
    if _is_depthwise(facts):
        return outputs % _FILLED == 0
    return inputs % LANES == 0 and outputs // group % LANES == 0


def computed_flops(facts: OpFacts) -> float:
    """Return the executed operations, including those on the zeros that fill blocks."""
    if not is_blocked(facts):
        return facts.flops
    group, outputs, inputs = _channels(facts)
    padding = _compute_padding(inputs) if group == 1 and inputs >= LANES else 1.0
    return facts.flops * _compute_padding(outputs) * padding


def unfolded_bytes(facts: OpFacts) -> float:
    """Return the bytes of the unfolded input, written and read again: 0 where the input is already a matrix."""
    if not _is_convolution(facts) or is_blocked(facts) or not facts.outputs:
        return 0.0
    group, _, inputs = _channels(facts)
    window = facts.inputs[1][2:]
    sides = (*integers(facts.attributes.get("strides")), *window)
    if max(sides) == 1 and not any(integers(facts.attributes.get("pads"))):
        return 0.0
    batch, _, *pixels = facts.outputs[0]
    return 2.0 * 4.0 * batch * prod(pixels) * group * inputs * prod(window)


def _is_convolution(facts: OpFacts) -> bool:
    return "Conv" in facts.op_type and len(facts.inputs) > 1 and len(facts.inputs[1]) == 4


def _is_depthwise(facts: OpFacts) -> bool:
    group, outputs, inputs = _channels(facts)
    return inputs == 1 and group == outputs


def _channels(facts: OpFacts) -> tuple[int, int, int]:
    """Return the groups, the output channels, and the input channels of a group."""
    outputs, inputs = facts.inputs[1][:2]
    return max(1, integer(facts.attributes.get("group"), 1)), max(1, outputs), max(1, inputs)


def _compute_padding(channels: int) -> float:
    return -(-channels // LANES) * LANES / channels
