"""The merge of models from files: read, group, match, plan, estimate the gain, write, verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import ModelProto, NodeProto

from gpuprof.domain.file_access import write_beside
from gpuprof.domain.model import Tensor
from gpuprof.domain.sizes import check_size
from gpuprof.errors import InfeasibleError, InputError, runtime_errors, shorten_message
from gpuprof.graph.element_types import FATAL_ONLY, dtype_name
from gpuprof.graph.file import read_onnx
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.graph.merged_model import MergedMember, MergedModel, write_description
from gpuprof.merging.gain import TYPICAL_CPU, GainContext, PlanGain, Rates, count_saved_bytes
from gpuprof.merging.groups import NodeGroup, count_graph, group_architectures, group_nodes
from gpuprof.merging.merger import build_merged
from gpuprof.merging.plan import MergePlan, Step, make_plan
from gpuprof.merging.source import OLDEST_OPSET, Array, SourceModel, normalise, number_names, read_source
from gpuprof.runtime.session import open_session

if TYPE_CHECKING:
    import onnxruntime


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Settings of a merge."""

    omega: float = 0.4  #: Least similarity of operators to merge, the paper's ω (its figure 26b).
    force: bool = False  #: Merge steps predicted to cost time, too.
    dims: Mapping[str, int] = field(default_factory=dict)  #: Sizes of free dimensions other than the batch.
    #: Batch of each model for the predicted gain; 1 where absent.
    batches: Mapping[str, int] = field(default_factory=dict)
    rates: Rates = TYPICAL_CPU  #: Device speeds for the predicted gain.

    def __post_init__(self) -> None:
        if not 0.0 <= self.omega <= 1.0:
            raise InputError(f"omega must be from 0 to 1 but is {self.omega:g}")
        if any(batch < 1 for batch in self.batches.values()):
            raise InputError(f"a batch must be at least 1 but is {min(self.batches.values())}")


@dataclass(frozen=True, slots=True)
class MergedInMemory:
    """Models merged in memory, not yet written or verified."""

    sources: tuple[SourceModel, ...]
    model: ModelProto
    described: MergedModel
    report: MergeReport  #: Writing adds the proof.

    def write(self, output: Path) -> MergeReport:
        """Prove that the outputs equal the originals', write the model, and return the report with the proof.

        Raises `InfeasibleError` when an output differs by more than the tolerance or the result is no valid model, and
        writes nothing; `InputError` when ``output`` cannot be written, or a model cannot be run.
        """
        with write_beside(output, "choose another place with -o") as path:
            _save(self, path)
            proof = prove_same(self.sources, path, self.described)
            _check_proof(proof)
            if any(proof.absent_rows.values()):
                members = [replace(m, absent_rows=proof.absent_rows.get(m.name, 0)) for m in self.described.members]
                write_description(self.model, MergedModel(tuple(members)))
                _save(self, path)
        return replace(self.report, proof=proof)


@dataclass(frozen=True, slots=True)
class Proposals:
    """The proposed merges, and the reasons for leaving other models out."""

    #: Models that share weights and are predicted to run faster as one graph; disjoint.
    merges: tuple[MergedInMemory, ...]
    left_out: tuple[tuple[str, str], ...]  #: (model, reason) of every other model.


def read_sources(
    paths: Sequence[Path], dims: Mapping[str, int] | None = None, names: Sequence[str] | None = None
) -> list[SourceModel]:
    """Read and normalise models, converted to the newest opset among them.

    ``names``: by default the files' stems, with a number for duplicates. Raises `InputError` like
    `gpuprof.merging.source.read_source`, and when ``dims`` names a dimension absent from all models.
    """
    names = source_names(paths) if names is None else names
    opsets = [_opset(path) for path in paths]
    target = max(*opsets, OLDEST_OPSET)
    _check_dims(paths, dims or {})
    sources = []
    for path, name, opset in zip(paths, names, opsets, strict=True):
        source = read_source(path, name, dims, None if opset == target else target)
        normalise(source)
        sources.append(source)
    return sources


def read_weights(paths: Sequence[Path]) -> list[SourceModel]:
    """Read models only to compare their weights: of any opset, with free dimensions of any length.

    Raises `InputError` as `gpuprof.merging.source.read_source` does.
    """
    sources = [read_source(path, name, any_length=True) for path, name in zip(paths, source_names(paths), strict=True)]
    for source in sources:
        normalise(source)
    return sources


def propose_merges(
    models: Sequence[Path], options: MergeOptions | None = None, names: Sequence[str] | None = None
) -> Proposals:
    """Return the merges among models that share a device.

    Models are grouped by architecture; within a group, models that share operators worth merging form a proposal.
    ``models``: ONNX files; a file listed twice is merged with itself; ``names``: their names in the merged model, by
    default the files' stems. Raises `InputError` when a file is no valid model, or has free dimensions other than its
    batch.
    """
    settings = options or MergeOptions()
    sources = read_sources(models, settings.dims, names)
    merges: list[MergedInMemory] = []
    left_out: dict[str, str] = {}
    for group in group_architectures([count_graph(source) for source in sources]):
        if len(group) == 1:
            left_out[sources[group[0]].name] = "no other model has an architecture like it"
            continue
        whole = merge_sources([sources[i] for i in group], settings)
        sets = _sharing(whole.report)
        for sharing in sets:
            part = [sources[i] for i in group if sources[i].name in sharing]
            merges.append(whole if len(part) == len(group) else merge_sources(part, settings))
        merged_names = set[str]().union(*sets)
        left_out |= {name: _why(whole.report, name) for name in whole.report.models if name not in merged_names}
    return Proposals(tuple(merges), tuple(left_out.items()))


def _sharing(report: MergeReport) -> list[set[str]]:
    """Return the sets of models that share operators, directly or through other models."""
    sets: list[set[str]] = []
    for row in (*report.merged, *report.shared):
        sharing = set(row.models)
        for members_set in [members for members in sets if members & sharing]:
            sharing |= members_set
            sets.remove(members_set)
        sets.append(sharing)
    return sets


def _why(report: MergeReport, name: str) -> str:
    """Return the reason why the operator closest to being merged was not merged."""
    rows = [row for row in report.operators if name in row.models]
    if not rows:
        return "it has no weighted operators"
    nearest = max(rows, key=lambda row: (len(row.models), row.similarity or 0.0))
    if len(nearest.models) > 1:
        return f"{nearest.operators[0]}: {nearest.reason}"
    reasons = sorted({row.reason for row in rows})
    return reasons[0]


def merge_sources(sources: Sequence[SourceModel], options: MergeOptions) -> MergedInMemory:
    """Merge normalised sources in memory. Steps predicted to cost time stay separate, unless forced.

    Equal weights are stored once in any case, at no cost.
    """
    groups = group_nodes(sources, options.omega)
    setting = GainContext([options.batches.get(source.name, 1) for source in sources], options.rates)
    left_out: dict[int, str] = {}
    plan = make_plan(sources, groups)
    # A group left out changes the gain of its neighbours. The loop ends because the set of groups left out grows.
    while unprofitable := _find_unprofitable(plan, setting, options.force):
        left_out |= unprofitable
        plan = make_plan(sources, groups, left_out)
    plan_gain = PlanGain(plan, setting)
    model, described = build_merged(plan)
    report = report_merge(plan, model, plan_gain.gain_s(plan_gain.steps), options.omega)
    return MergedInMemory(tuple(sources), model, described, report)


def _opset(path: Path) -> int:
    return max((o.version for o in read_onnx(path).model.opset_import if o.domain in ("", "ai.onnx")), default=1)


def source_names(paths: Sequence[Path]) -> list[str]:
    """Return the models' names in a merge: the files' stems, duplicates numbered."""
    return number_names([path.stem for path in paths], "{}-{}")


def _check_dims(paths: Sequence[Path], dims: Mapping[str, int]) -> None:
    from gpuprof.graph.dims import declared_dims

    free_dims: set[str] = set()
    for path in paths:
        for info in read_onnx(path).model.graph.input:
            for axis, dim in enumerate(declared_dims(info) or ()):
                free_dims.add(dim if isinstance(dim, str) else f"{info.name}:{axis}")
    for name, size in dims.items():
        if name not in free_dims:
            raise InputError(f"no model has a free dimension {name!r}", "see gpuprof zoo, or leave --dim away")
        check_size(name, size)


def _find_unprofitable(plan: MergePlan, setting: GainContext, force: bool) -> dict[int, str]:
    """Return group → reason for groups that share nothing or cost time when merged."""
    plan_gain = PlanGain(plan, setting)
    reasons: dict[int, str] = {}
    for steps in plan_gain.components(plan_gain.steps):
        component = [plan.steps[i] for i in steps]
        is_weighted = any(step.held or plan.group(step).operators for step in component)
        if any(step.is_concatenated or not step.once for step in component) and not (
            is_weighted and any(count_saved_bytes(plan, step) for step in component)
        ):
            reason = "as one it would read no fewer weights" if is_weighted else "it has no weights to share"
            reasons |= {step.group: reason for step in component}
    if reasons or force:
        return reasons
    once = plan_gain.best()
    for steps in plan_gain.components(plan_gain.steps - once):
        cost_us = 1e6 * (plan_gain.gain_s(once) - plan_gain.gain_s(once | steps))
        reason = f"as one it is predicted to cost {cost_us:.3g} µs"
        reasons |= {plan.steps[i].group: reason for i in steps}
    return reasons


def _check_proof(proof: Proof) -> None:
    worst = proof.worst
    if worst is not None and not worst.is_within:
        raise InfeasibleError(
            f"output {worst.output} of {worst.model} differs by {worst.relative:.3g} of its largest value, "
            f"over {worst.tolerance:g}, when called with {worst.call}: nothing is written",
            "a larger --omega merges less",
        )


def _save(merged: MergedInMemory, path: Path) -> None:
    total = merged.report.weight_bytes_after
    try:
        if 2 * total > onnx.checker.MAXIMUM_PROTOBUF or any(source.external for source in merged.sources):
            data = path.with_name(f"{path.name}.data")
            data.unlink(missing_ok=True)  # onnx appends
            copy = ModelProto()
            copy.CopyFrom(merged.model)
            onnx.save_model(copy, str(path), save_as_external_data=True, location=data.name, size_threshold=1024)
            data.chmod(path.stat().st_mode)  # onnx makes it unreadable to other users, such as a server's
        else:
            onnx.save_model(merged.model, str(path))
        onnx.checker.check_model(str(path), full_check=True)
    except OSError as error:
        raise InputError(f"cannot write {path.name}: {error.strerror or error}") from error
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        text = f"the merged model is not valid ONNX, so nothing is written: {shorten_message(error)}"
        raise InfeasibleError(text) from error


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


def report_merge(plan: MergePlan, model: ModelProto, gain_s: float, omega: float) -> MergeReport:
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
        weight_bytes_before=sum(  # equal data counted once
            sum({source.digest(name): source.weight_bytes(name) for name in source.weights}.values())
            for source in plan.sources
        ),
        weight_bytes_after=sum(
            Tensor(t.name, dtype_name(t.data_type), tuple(t.dims)).bytes for t in model.graph.initializer
        ),
        gain_s=gain_s,
    )


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
    if plan.group(step).operators:
        return f"no operator of its type that starts when it does is {omega:g} similar to it"
    return "no op of its type that starts when it does holds the same weights, and they are shared whole or not at all"


#: Largest difference allowed, relative to the largest value of the output. Half precision keeps 11 bits, bfloat16 8.
TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of an output of the merged model from the original's."""

    model: str
    output: str
    dtype: str
    #: Largest difference divided by the largest absolute value of the original output; for integers the fraction of
    #: differing entries. Infinite if only one of the outputs has NaN.
    relative: float
    tolerance: float
    call: str  #: Models and batches of the call with the largest difference.

    @property
    def is_within(self) -> bool:
        """Whether the difference is tolerated."""
        return self.relative <= self.tolerance


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of the comparison."""

    differences: tuple[Difference, ...]  #: Largest difference of each output.
    calls: tuple[str, ...]  #: Models and batches of each call.
    #: Number of rows (0 or 1) that stand for an absent model, by model.
    absent_rows: dict[str, int]

    @property
    def worst(self) -> Difference | None:
        """Largest difference, of those beyond their tolerance if there are any."""
        return max(self.differences, key=lambda d: (not d.is_within, d.relative), default=None)


def relative_difference(original: Array, merged: Array) -> float:
    """Return the relative difference of ``merged`` from ``original``; see `Difference`."""
    if original.shape != merged.shape or original.dtype != merged.dtype:
        return float("inf")
    if original.size == 0:
        return 0.0
    if original.dtype.kind not in "fV":
        return float(np.mean(original != merged))
    a, b = original.astype(np.float64), merged.astype(np.float64)
    with np.errstate(invalid="ignore"):
        distances = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    largest = float(np.nan_to_num(distances, nan=np.inf, posinf=np.inf).max())
    return largest / (float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) or 1.0)


def prove_same(sources: Sequence[SourceModel], merged: Path, described: MergedModel) -> Proof:
    """Run the originals and the merged file on random inputs and return the differences.

    The calls: all models at different batches, with inputs of standard deviation 1 and 30; then each model absent, with
    a row of zeros in its place if an empty batch fails. Raises `InputError` when a model cannot be run at all.
    """
    prover = _Prover(sources, merged, described)
    # Batches differ between models, because equal batches would hide an exchange of two models' rows.
    for seed in (0, 1):
        prover.compare([1 + (i + seed) % 3 for i in range(len(sources))], seed)
    absent = {}
    for i, source in enumerate(sources):
        batches = [None if model == i else 2 for model in range(len(sources))]
        absent[source.name] = prover.compare_without(batches) if len(sources) > 1 else 0
    return Proof(tuple(prover.worst.values()), tuple(prover.calls), absent)


class _Prover:
    def __init__(self, sources: Sequence[SourceModel], merged: Path, described: MergedModel) -> None:
        self._sources, self._path, self._described = sources, merged, described
        self._session = open_session(merged, threads=1)
        self._answers: dict[tuple[int, int, int], tuple[dict[str, Array], dict[str, Array]]] = {}
        self.worst: dict[tuple[str, str], Difference] = {}
        self.calls: list[str] = []

    def compare(self, batches: Sequence[int | None], seed: int, absent_rows: int = 0) -> None:
        """Run a call of the merged model, with models of batch None absent, and compare with the originals."""
        members = [replace(member, absent_rows=absent_rows) for member in self._described.members]
        described, call = MergedModel(tuple(members)), []
        inputs, expected = dict[str, dict[str, Array]](), dict[str, dict[str, Array]]()
        for i, (member, batch) in enumerate(zip(members, batches, strict=True)):
            call.append(f"{member.name} {'absent' if batch is None else f'× {batch}'}")
            if batch is not None:
                inputs[member.name], expected[member.name] = self._run_original(i, batch, seed)
        names = [name for present in expected for name in described.output_names(present)]
        results = _run(self._session, described.feeds(inputs), self._path, names)
        self.calls.append(", ".join(call))
        for member in members:
            if member.name in expected:
                self._note(member, expected[member.name], described.answers(results, member.name))

    def compare_without(self, batches: Sequence[int | None]) -> int:
        """Compare a call with a model absent; return the number of rows in its place."""
        # An empty batch ends the process in some ops, so it is not tried with them.
        if not any(_may_crash(source.nodes) for source in self._sources):
            try:
                self.compare(batches, 0)
                return 0
            except InputError:  # an op of the merged model cannot take an empty batch
                pass
        self.compare(batches, 0, absent_rows=1)
        return 1

    def _run_original(self, model: int, batch: int, seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return (inputs, outputs) of an original by name; a single session at a time, to save memory."""
        key = (model, batch, seed)
        if key not in self._answers:
            source = self._sources[model]
            inputs = random_inputs(load_graph(source.path, batch, source.name, source.dims), 1000 * model + seed)
            inputs = {name: _with_gaps(name, _enlarge(value, seed), seed) for name, value in inputs.items()}
            session = open_session(source.path, threads=1)
            self._answers[key] = inputs, _run(session, inputs, source.path, list(source.outputs))
        return self._answers[key]

    def _note(self, member: MergedMember, expected: dict[str, Array], answers: dict[str, Array]) -> None:
        for value in member.outputs:
            tolerance = TOLERANCES.get(value.dtype, 0.0)
            relative = relative_difference(expected[value.name], answers[value.name])
            difference = Difference(member.name, value.name, value.dtype, relative, tolerance, self.calls[-1])
            key = (member.name, value.name)
            if key not in self.worst or not self.worst[key].relative >= relative:
                self.worst[key] = difference


def _may_crash(nodes: Sequence[NodeProto]) -> bool:
    """Return whether an empty batch may crash the runtime: recurrent ops, ops outside ONNX's domain, nested graphs."""
    return any(
        node.op_type in ("LSTM", "GRU", "RNN") or node.domain or any(item.HasField("g") for item in node.attribute)
        for node in nodes
    )


def _enlarge(value: Array, seed: int) -> Array:
    """Return the inputs of the second call: floats 30 times as large; integers, counts or indices, unchanged.

    Large inputs expose the error of weights treated as equal in models that amplify.
    """
    return np.multiply(value, np.asarray(30.0, value.dtype)) if seed and value.dtype.kind in "fV" else value


def _with_gaps(name: str, value: Array, seed: int) -> Array:
    """Mask the end of every second row: with masks of ones, swapped masks of two models would go unnoticed."""
    if "mask" not in name.lower() or value.ndim != 2 or seed % 2 == 0 or value.shape[1] < 4:
        return value
    masked = value.copy()
    masked[::2, -(value.shape[1] // 4) :] = 0
    return masked


def _run(
    session: onnxruntime.InferenceSession, feeds: dict[str, Array], path: Path, names: list[str]
) -> dict[str, Array]:
    import onnxruntime as ort

    options = ort.RunOptions()
    options.log_severity_level = FATAL_ONLY  # empty batches are tried on purpose
    try:
        return dict(zip(names, session.run(names, feeds, options), strict=True))
    except runtime_errors() as error:
        raise InputError(f"{path} cannot be run: {shorten_message(error)}") from error
