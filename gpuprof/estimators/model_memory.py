"""Memory of models: measured, else interpolated or extrapolated, else from weights and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import EXTRAPOLATED, Figure, Workload
from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.domain.share import Share
from gpuprof.estimators.constants import constant
from gpuprof.estimators.cross_gpu.execution import Execution, type_of_weights
from gpuprof.estimators.cross_gpu.node_groups import CONVOLUTIONS, PRODUCTS, NodeGroups
from gpuprof.estimators.measured.known_models import KnownModels
from gpuprof.estimators.measured.measured import MeasuredModel, blend_measured
from gpuprof.estimators.measured.surface import BatchCurve, blend_figures
from gpuprof.estimators.memory import PROCESS, context_fraction, predict_held, predict_process, shrink_context
from gpuprof.estimators.model_latency import part_of_one
from gpuprof.estimators.roofline import WorkByBatch, source_of

if TYPE_CHECKING:  # scikit-learn takes a second to import
    from gpuprof.estimators.learned.learned import LearnedModel

#: Types that a runtime converts to the chosen precision; narrower types and integers stay.
_CHANGED = frozenset({"float64", "float32", "float16", "bfloat16"})
#: Catalogue's name of a precision → type of activations and other weights, type of the weights of products.
_TYPES = {
    "float64": ("float64", "float64"),
    "float32": ("float32", "float32"),
    "tfloat32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float8": ("float16", "float8e4m3fn"),
    "int8": ("float16", "int8"),
}
#: Precisions with attention as a single kernel.
NARROW = frozenset({"float16", "bfloat16", "float8", "int8"})


def hold_graph(graph: ModelGraph, precision: str, *, retyped: bool) -> ModelGraph:
    """Return the graph with the tensors that a runtime holds in memory when it computes products in ``precision``.

    ``retyped``: whether the precision differs from the file's, so that weights and activations change type.
    """
    ops = _join_attention(graph.ops) if precision in NARROW else graph.ops
    if not retyped:
        return replace(graph, ops=ops)
    general, operand = _TYPES[precision]
    multiplied = {weight.name for op in ops if op.op_type in PRODUCTS | CONVOLUTIONS for weight in op.weights}

    def retype(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        types = (
            (tensor, operand if tensor.name in multiplied and len(tensor.shape) > 1 else general) for tensor in tensors
        )
        return tuple(replace(tensor, dtype=dtype) if tensor.dtype in _CHANGED else tensor for tensor, dtype in types)

    changed = (replace(op, inputs=retype(op.inputs), outputs=retype(op.outputs)) for op in ops)
    inputs, outputs = retype(graph.inputs), retype(graph.outputs)
    return replace(graph, ops=tuple(changed), inputs=inputs, outputs=outputs, weights=retype(graph.weights))


def _join_attention(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return the ops with each attention joined to a single op that reads all outside inputs of its ops."""
    joined: dict[int, Op] = {}
    inside: set[int] = set()
    for last, group in NodeGroups(ops, fused=False, narrow=True).attention.items():
        outputs = {tensor.name for place in group for tensor in ops[place].outputs}
        inputs = {t.name: t for place in sorted(group) for t in ops[place].inputs if t.name not in outputs}
        joined[last] = replace(ops[last], inputs=tuple(inputs.values()))
        inside.update(group)
    return tuple(joined.get(place, op) for place, op in enumerate(ops) if place not in inside or place in joined)


class ModelMemory:
    """Peak memory of one process of a model, from the best available source for each.

    ``learned``: device → regressors trained for it, or None; preferred to the sum of weights and activations;
    ``execution``: precision and runtime of models on unmeasured GPUs.
    """

    def __init__(
        self, models: KnownModels, learned: Callable[[Device], LearnedModel | None], execution: Execution | None = None
    ) -> None:
        self._known, self._learned, self._execution = models, learned, execution or Execution()
        self._held: dict[tuple[str, str], WorkByBatch] = {}
        self._reserved: dict[tuple[str, str, int], Figure] = {}
        self._types: dict[str, str] = {}

    def peak(self, model: MeasuredModel, device: Device, workload: Workload) -> Figure | None:
        """Return the peak memory: measured, linear in the batch or between sizes, else from weights and activations."""
        if not model.points.get(device.name) and not model.others:
            return self._predict(model, device, workload)
        if not model.points.get(device.name):
            parts = blend_measured(model, device.name)
            each = [(self.peak(sized_model, device, workload), weight) for sized_model, weight in parts]
            if each and all(figure is not None for figure, _ in each):
                return blend_figures([(figure, weight) for figure, weight in each if figure is not None])
            if (beyond := self._beyond_sizes(model, device, workload)) is not None:
                return beyond
        points = model.points.get(device.name, [])
        same = {p.batch: p.figures["memory_peak_bytes"] for p in points if "memory_peak_bytes" in p.figures}
        same |= {
            p.batch: p.figures["memory_peak_bytes"]
            for p in points
            if "memory_peak_bytes" in p.figures and p.share == workload.share and p.processes == workload.processes
        }
        if same:
            curve = BatchCurve(same)
            reading = curve.at(workload.batch)
            return Figure(*reading) if reading else curve.extrapolate(workload.batch)
        return self._predict(model, device, workload)

    def context_bytes(self, device: Device, memory: Figure | None, weight_bytes: int, workload: Workload) -> int:
        """Return the part of the peak memory that is the context of a process on a GPU, 0 where it is unknown.

        A prediction from weights and activations includes a constant one. A measured context is not told apart, so the
        smallest is assumed, in figures that can include one: others are an allocator's.
        """
        if device.kind != "gpu" or memory is None:
            return 0
        fraction = context_fraction(device.granted_fraction(part_of_one(workload.share, workload.processes)))
        if memory.source.startswith(PROCESS):
            return int(fraction * constant("memory", "process_bytes"))
        least = int(fraction * constant("memory", "least_process_bytes"))
        return least if memory.is_observed and memory.value - weight_bytes >= least else 0

    def _predict(self, model: MeasuredModel, device: Device, workload: Workload) -> Figure | None:
        """Return the memory of weights, activations and, on a GPU, the context; None without the model's file."""
        batch = workload.batch
        work = self._known.read_work(model)
        if work is None:
            return None
        if (learned := self._learned(device)) and learned.memory:
            return learned.memory_figure(self._known.bind_graph(model, batch))
        if device.kind != "gpu":
            at = work.at(batch)
            return Figure(at.weight_bytes + at.activation_bytes, source_of(device))
        if model.name not in self._types:
            self._types[model.name] = type_of_weights(work.graph)
        precision = self._execution.rate_name(device, self._types[model.name])
        key = model.name, precision, batch
        if key not in self._reserved:  # a plan asks for each batch under dozens of shares
            at = self._hold(model, work, precision).at(batch)
            predict = predict_held if self._execution.runtime.is_onnxruntime else predict_process
            self._reserved[key] = predict(at.weight_bytes, at.activation_bytes, self._execution.precision)
        return shrink_context(
            self._reserved[key], device.granted_fraction(part_of_one(workload.share, workload.processes))
        )

    def _hold(self, model: MeasuredModel, work: WorkByBatch, precision: str) -> WorkByBatch:
        """Return the work of a model with the tensors in memory in ``precision``."""
        retyped = self._execution.precision is not None
        if not (retyped or precision in NARROW):
            return work
        key = model.name, precision
        if key not in self._held:

            def bind_held(batch: int) -> ModelGraph:
                return hold_graph(self._known.bind_graph(model, batch), precision, retyped=retyped)

            self._held[key] = WorkByBatch(bind_held, work.smallest_batch)
        return self._held[key]

    def _beyond_sizes(self, model: MeasuredModel, device: Device, workload: Workload) -> Figure | None:
        """Return the memory at the nearest measured sizes plus the difference in activations; None where unknown."""
        work = self._known.read_work(model)
        if work is None:
            return None
        activation_bytes = work.at(workload.batch).activation_bytes
        by_distance = []
        for peer in model.others:
            figure = self.peak(peer, device, workload) if peer.points.get(device.name) else None
            if figure is not None and (sibling_work := self._known.read_work(peer)) is not None:
                more = activation_bytes - sibling_work.at(workload.batch).activation_bytes
                by_distance.append((abs(more), Figure(max(figure.value + more, work.at(1).weight_bytes), EXTRAPOLATED)))
        return min(by_distance, key=lambda pair: pair[0])[1] if by_distance else None

    def fits(self, model: MeasuredModel, device: Device, batch: int, share: Share) -> bool:
        """Return whether a batch fits into the memory of a share; true where its memory is unknown."""
        memory = self.peak(model, device, Workload(model.model, batch, share))
        return memory is None or memory.value <= device.memory_bytes(share)
