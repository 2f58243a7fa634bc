"""Report of a merge: operators, bytes of weights, and how far the results differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import ModelProto

from gpuprof.domain.model import Tensor
from gpuprof.graph.element_types import dtype_name
from gpuprof.merging.gain import MergeGain, Rates
from gpuprof.merging.groups import NodeGroup
from gpuprof.merging.plan import MergePlan, Step
from gpuprof.merging.proof import Proof
from gpuprof.merging.source import SourceModel

MERGED, DIVIDED, SHARED, APART = "merged", "super-operator", "shared", "apart"


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """The outcome for a weighted operator, or for several matched operators."""

    #: ``models``, ``operators``: Names of each member's model and operator.
    models: tuple[str, ...]
    operators: tuple[str, ...]
    op_type: str
    #: "merged", "super-operator", "shared" or "apart". Shared: each model runs its own op, on the common weight.
    how: str
    similarity: float | None  #: Least similarity of any two members; None for an operator without a partner.
    weight_bytes: int  #: Weights of all members before the merge.
    saved_bytes: int  #: Duplicate weights removed.
    reason: str  #: Reason for running apart, else empty.


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The result of a merge."""

    models: tuple[str, ...]
    #: Every weighted operator, and every op that holds weights, by start time.
    operators: tuple[OperatorRow, ...]
    other_ops_merged: int  #: Ops without large weights that run once for several models.
    #: ``weight_bytes_before``, ``weight_bytes_after``: Constants of all models, and of the merged model.
    weight_bytes_before: int
    weight_bytes_after: int
    gain: MergeGain  #: Predicted gain of the merged steps.
    gain_s: float  #: Predicted time saved in a call with every model at its batch.
    proof: Proof | None = None  #: None if nothing was merged.

    @property
    def merged(self) -> tuple[OperatorRow, ...]:
        """Operators that run once for several models, wholly or in part."""
        return tuple(row for row in self.operators if row.how in (MERGED, DIVIDED))

    @property
    def shared(self) -> tuple[OperatorRow, ...]:
        """Operators that run apart on a shared weight."""
        return tuple(row for row in self.operators if row.how == SHARED)

    @property
    def saved_bytes(self) -> int:
        """Bytes of weights saved by the merge."""
        return self.weight_bytes_before - self.weight_bytes_after


def report_merge(plan: MergePlan, model: ModelProto, gain: MergeGain, rates: Rates, omega: float) -> MergeReport:
    """Return the report of a plan and the model built from it."""
    rows, unweighted_merges = [], 0
    for step in plan.steps:
        group = plan.group(step)
        if group.operators or step.held:
            rows.append(_row(plan, step, group, omega))
        elif step.once:
            unweighted_merges += 1
    return MergeReport(
        models=tuple(source.name for source in plan.sources),
        operators=tuple(rows),
        other_ops_merged=unweighted_merges,
        weight_bytes_before=sum(weights_of(source) for source in plan.sources),
        weight_bytes_after=sum(_bytes(t.name, t.data_type, t.dims) for t in model.graph.initializer),
        gain=gain,
        gain_s=gain.seconds(rates),
    )


def weights_of(source: SourceModel) -> int:
    """Return the bytes of a model's constants, equal data counted once."""
    distinct = {source.digest(name): source.weight_bytes(name) for name in source.weights}
    return sum(distinct.values())


def _bytes(name: str, data_type: int, dims: Sequence[int]) -> int:
    return Tensor(name, dtype_name(data_type), tuple(dims)).bytes


def _row(plan: MergePlan, step: Step, group: NodeGroup, omega: float) -> OperatorRow:
    weights = {m: (operator.weight,) for m, operator in group.operators.items()} or step.held
    sizes = [sum(map(plan.sources[m].weight_bytes, weights[m])) for m in step.models]
    nodes = [plan.node(step, m) for m in step.models]
    saved_bytes, sharing = 0, APART
    if step.once:
        saved_bytes, sharing = sum(sizes) - max(sizes), MERGED
    elif step.super_operator is not None:
        saved_bytes, sharing = (len(step.models) - 1) * step.super_operator.shared_bytes, DIVIDED
    elif step.shares_weight:
        saved_bytes, sharing = sum(sizes) - max(sizes), SHARED
    is_single = len(step.models) == 1
    return OperatorRow(
        tuple(plan.sources[m].name for m in step.models),
        tuple(node.name or node.output[0] for node in nodes),
        nodes[0].op_type,
        sharing,
        None if is_single else group.similarity,
        sum(sizes),
        saved_bytes,
        _why_alone(plan, step, omega) if is_single else step.reason,
    )


def _why_alone(plan: MergePlan, step: Step, omega: float) -> str:
    model = step.models[0]
    operator = plan.group(step).operators.get(model)
    if operator is None:
        return (
            "no op of its type that starts when it does holds the same weights, and they are shared whole or not at all"
        )
    similarities = [
        similarity
        for group, near_model, name, similarity in plan.grouping.near_misses
        if group == step.group or (near_model == model and name == operator.name)
    ]
    if not similarities:
        return "no operator of its type starts when it does"
    return f"at most {max(similarities):.2g} similar to any that starts when it does, below {omega:g}"
