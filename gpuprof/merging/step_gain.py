"""The gain of merging a single op, regardless of its context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto

from gpuprof.merging.gain import MergeGain, Rates
from gpuprof.merging.plan import MergePlan, Step
from gpuprof.merging.shareable_constants import is_lookup
from gpuprof.merging.source import SourceModel
from gpuprof.merging.super_operator import SuperOperator, bias_of

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv"})
#: Ops that runtimes fuse into the convolution before them.
_RIDERS = frozenset(
    {"BatchNormalization", "Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Add", "Sum"}
)

#: (sha256 of the model file, op name) → number of rows → seconds.
OpSeconds = Mapping[tuple[str, str], Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class GainContext:
    """Parameters of the gain of a merge: batches, device speeds and measurements."""

    batches: Sequence[int]  #: Batch of each model.
    rates: Rates
    #: Measured times of ops on the device; may be empty.
    measured: OpSeconds = field(default_factory=dict)


def step_gain(plan: MergePlan, step: Step, setting: GainContext) -> MergeGain:
    """Return the gain of running a merged step once, without copies at its borders."""
    if step.super_operator is not None:
        return _super_gain(plan, step, step.super_operator, setting)
    if all(axis is None for axis in step.output_axes):  # all inputs are constants or a value shared by all models
        return MergeGain(saved_launches=len(step.models) - 1)
    saved = (len(step.models) - 1) * _weight_bytes(plan, step)
    measured = _measured_gain(plan, step, setting)
    if measured is not None:
        # The saved bytes are reported; their time is subtracted, because the measurement includes it.
        return MergeGain(saved_bytes=saved, measured_s=measured - saved / setting.rates.bytes_per_s)
    absorbed = all(is_absorbed(plan.sources[m], source_node(plan, step, m)) for m in step.models)
    touched = [
        _memory_traffic(plan.sources[m], source_node(plan, step, m), setting.batches[m], absorbed) for m in step.models
    ]
    together = setting.rates.moved_bytes(sum(t for t, _ in touched), sum(w for _, w in touched))
    apart = sum(setting.rates.moved_bytes(traffic, working) for traffic, working in touched)
    return MergeGain(
        saved_bytes=saved,
        added_bytes=round(max(0.0, together - apart)),
        saved_launches=0 if absorbed else len(step.models) - 1,
    )


def source_node(plan: MergePlan, step: Step, model: int) -> NodeProto:
    """Return the node of a model in a step."""
    return plan.sources[model].nodes[step.node_positions[model]]


def is_absorbed(source: SourceModel, node: NodeProto) -> bool:
    """Return whether a runtime fuses the node into the convolution before it."""
    return absorbed_input(source, node) is not None


def absorbed_input(source: SourceModel, node: NodeProto) -> str | None:
    """Return the input of a node from the convolution (or fused op) into which the node is fused; else None."""
    if node.op_type not in _RIDERS or node.domain:
        return None
    for name in node.input:
        maker = source.maker(name)
        if maker is None or source.uses(name) > 1 or maker.domain:
            continue
        if maker.op_type in CONVOLUTIONS or (maker.op_type != node.op_type and is_absorbed(source, maker)):
            return str(name)
    return None


def _weight_bytes(plan: MergePlan, step: Step) -> int:
    first = step.models[0]
    source, node = plan.sources[first], source_node(plan, step, first)
    if is_lookup(node):
        return 0
    names = {name for name in node.input if name in source.weights}
    operator = plan.group(step).operators.get(first)
    if operator is not None:  # the weight may be the input of a DequantizeLinear
        names.add(operator.weight)
    return sum(source.weight_bytes(name) for name in names)


def _memory_traffic(source: SourceModel, node: NodeProto, batch: int, absorbed: bool) -> tuple[float, float]:
    """Return the bytes of activations moved by an op, and the bytes in use meanwhile.

    Memory is fetched before being written. Traffic of a fused op is counted at the op into which it is fused.
    """
    skipped = absorbed_input(source, node) if absorbed else None
    taken = {name for name in node.input if name in source.values and name not in source.weights}
    read = sum(source.values[name].bytes_at(batch) for name in taken if name != skipped)
    written = sum(source.values[name].bytes_at(batch) for name in node.output if name)
    return read + (0 if absorbed else 2 * written), read + written


def _measured_gain(plan: MergePlan, step: Step, setting: GainContext) -> float | None:
    """Return the seconds saved by measurements at the models' batches and at their sum; None if any is missing."""
    rows = [setting.batches[m] for m in step.models]
    curves = [setting.measured.get((plan.sources[m].sha256, source_node(plan, step, m).name)) for m in step.models]
    together = max((_at(curve, sum(rows)) or 0.0 for curve in curves if curve), default=0.0)
    apart = [_at(curve, batch) if curve else None for curve, batch in zip(curves, rows, strict=True)]
    if not together or any(seconds is None for seconds in apart):
        return None
    return sum(seconds or 0.0 for seconds in apart) - together


def _at(curve: Mapping[int, float], rows: int) -> float | None:
    """Return the time at a number of rows, linearly interpolated; None outside the measured range."""
    if rows in curve:
        return curve[rows]
    below, above = [r for r in curve if r < rows], [r for r in curve if r > rows]
    if not below or not above:
        return None
    low, high = max(below), min(above)
    return curve[low] + (curve[high] - curve[low]) * (rows - low) / (high - low)


def _super_gain(plan: MergePlan, step: Step, shared: SuperOperator, setting: GainContext) -> MergeGain:
    group, n = plan.group(step), len(step.models)
    first, rates = step.models[0], setting.rates
    array = plan.sources[first].array(group.operators[first].weight)
    item, per = array.dtype.itemsize, max(1, array[0, 0].size)
    gain = MergeGain(saved_bytes=(n - 1) * shared.inputs * shared.outputs * item * per, saved_launches=n - 1)
    for m in step.models:
        node, source, batch = group.operators[m].node, plan.sources[m], setting.batches[m]
        taken, written = (source.values[name].bytes_at(batch) for name in (node.input[0], node.output[0]))
        out = written * shared.outputs // shared.totals[m][1]
        rest_in = taken * (shared.totals[m][0] - shared.inputs) // shared.totals[m][0]
        gain += MergeGain(added_bytes=round(rates.copied_bytes(out)), added_launches=1)  # split of the product
        if not shared.takes_all(m):  # cut, rest, sum
            copied = rates.copied_bytes(taken) + rates.copied_bytes(rest_in) + rates.copied_bytes(out)
            gain += MergeGain(added_bytes=round(copied), added_launches=5, added_flops=out // item)
        if not shared.is_complete(m):  # the other outputs, joined to the product
            gain += MergeGain(added_bytes=round(rates.copied_bytes(written)), added_launches=2)
        if bias_of(group, m) is not None:
            gain += MergeGain(
                added_bytes=round(rates.copied_bytes(written)), added_launches=1, added_flops=written // item
            )
    return gain
