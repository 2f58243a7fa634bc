"""Features of ops, and training data of the regressors: a device's measured ops and models, and ops executed together.

The expected time is the sum of arithmetic and traffic. On a CPU the parts add up: a core waits for data outside its
caches, and little of the wait is hidden behind arithmetic (of a product of 16 rows by 2048 x 2048 weights on one core,
1.40 ms are arithmetic, 0.35 ms traffic, and 1.70 ms were measured). On a GPU, whose threads hide one behind the other,
the expected time is the roofline. Regressors learn the ratio of an op's time to it, which differs far less from op to
op than the time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph, Op
from gpuprof.domain.runtime_variant import comparable_rows
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import split_name
from gpuprof.errors import InputError
from gpuprof.estimators.creq import predict_graph
from gpuprof.estimators.measured.measured import CREQ_METRICS
from gpuprof.estimators.memory import peak_activation_bytes
from gpuprof.estimators.roofline import (
    MATRIX_OPS,
    GraphWork,
    bandwidth,
    op_times_s,
    reread_bandwidth,
)
from gpuprof.graph.executed_graph import find_costliest, tie_nodes
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ModelRow, OpRow, model_at_dims
from gpuprof.kernel_db.store import KernelDb
from gpuprof.runtime.optimizer import executed_nodes

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts of an op found both in the graph and in the table ``ops`` of the database."""

    op_type: str
    dtype: str
    #: ``inputs``, ``outputs``: Shapes.
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    attributes: Mapping[str, Any]
    #: ``flops``, ``bytes_read``, ``bytes_written``, ``weight_bytes``: 0 flops where no formula is known.
    flops: float
    bytes_read: float
    bytes_written: float
    weight_bytes: float
    batch: int
    #: ``fused``, ``fused_functions``, ``fused_inputs``: Number of ops executed together, this op included; number of
    #: transcendental functions among the other ops; number of further activations read by the other ops.
    fused: int = 1
    fused_functions: int = 0
    fused_inputs: int = 0
    #: Bytes touched by the whole model between two executions of the op; infinite where unknown.
    working_set: float = math.inf


def facts_of_op(op: Op, batch: int) -> OpFacts:
    """Return the facts of a node of a graph read at ``batch``."""
    return OpFacts(
        op.op_type,
        (op.inputs or op.outputs)[0].dtype if op.inputs or op.outputs else "float32",
        tuple(tensor.shape for tensor in op.inputs),
        tuple(tensor.shape for tensor in op.outputs),
        op.attributes,
        float(op.flops or 0),
        float(op.bytes_read),
        float(op.bytes_written),
        float(op.weight_bytes),
        batch,
    )


def facts_of_row(row: OpRow) -> OpFacts:
    """Return the facts of a row of the table ``ops``."""
    before, _, after = (row.shapes or "->").partition("->")
    return OpFacts(
        row.op_type,
        row.dtype or "float32",
        _shapes(before),
        _shapes(after),
        json.loads(row.attributes or "{}"),
        float(row.flops or 0),
        float(row.bytes_read or 0),
        float(row.bytes_written or 0),
        float(row.weight_bytes or 0),
        row.batch,
    )


def channels_in_group(facts: OpFacts) -> int:
    """Return the input channels per group of a convolution; 1 for other ops."""
    is_convolution = "Conv" in facts.op_type and len(facts.inputs) > 1 and len(facts.inputs[1]) > 1
    return max(1, facts.inputs[1][1]) if is_convolution else 1


def window(facts: OpFacts) -> int:
    """Return the elements of the window of a convolution or pooling, 1 for other ops."""
    sides = integers(facts.attributes.get("kernel_shape"))
    if not sides and "Conv" in facts.op_type and len(facts.inputs) > 1:
        sides = list(facts.inputs[1][2:])
    return max(1, prod(sides))


def integers(value: object) -> list[int]:
    """Return the items of an attribute that is a list of numbers, an empty list otherwise."""
    return [int(item) for item in value] if isinstance(value, list | tuple) else []


def integer(value: object, default: int) -> int:
    """Return the value of a numeric attribute, else ``default``."""
    return int(value) if isinstance(value, int | float) else default


def _shapes(text: str) -> tuple[Shape, ...]:
    """Return the shapes in ``"1x3x224x224,64x3x7x7,()"``; the last is a scalar."""
    parts = text.split(",") if text else ()
    return tuple(tuple(int(side) for side in part.strip("()").split("x") if side) for part in parts)


#: Float32 values in a vector register of 512 bits: kernels block channels by them.
_LANES = 16

Array = NDArray[Any]
#: Kinds of ops with similar implementations in runtimes; all others are "other".
KINDS: Mapping[str, frozenset[str]] = {
    "matrix": frozenset({"Gemm", "MatMul", "MatMulInteger", "Einsum", "FusedMatMul", "FusedGemm", "Attention"}),
    "pool": frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool"}),
    "norm": frozenset({"LayerNormalization", "InstanceNormalization", "GroupNormalization",
                       "SimplifiedLayerNormalization", "RMSNormalization", "LpNormalization"}),
    "local_norm": frozenset({"LRN"}),  # a power for each element: no other op has such a cost
    "reduce": frozenset({"Softmax", "LogSoftmax", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2",
                         "ArgMax", "ArgMin", "TopK", "CumSum"}),
    "recurrent": frozenset({"LSTM", "GRU", "RNN"}),
    "function": frozenset({"Sigmoid", "Tanh", "Erf", "Exp", "Log", "Gelu", "Sqrt", "Pow", "HardSwish", "HardSigmoid",
                           "Softplus", "Mish", "Elu", "Selu", "Swish", "Reciprocal", "Sin", "Cos"}),
    "elementwise": frozenset({"Add", "Sub", "Mul", "Div", "Relu", "Clip", "Sum", "LeakyRelu", "PRelu", "Neg", "Abs",
                              "Min", "Max", "Where", "Equal", "Cast", "Not", "And", "Or", "Less", "Greater",
                              "BatchNormalization"}),  # in inference a multiplication and an addition
    "copy": frozenset({"Concat", "Split", "Slice", "Pad", "Gather", "Expand", "Tile", "Resize", "ScatterND",
                       "Transpose", "DepthToSpace", "SpaceToDepth", "GatherND", "GatherElements", "Upsample"}),
    "view": frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Shape"}),
}  # fmt: skip
_CONVOLUTIONS = ("conv", "pointwise", "depthwise", "grouped")
_KIND_NAMES = (*_CONVOLUTIONS, *KINDS, "other")
_KIND_OF = {op_type: kind for kind, members in KINDS.items() for op_type in members}

FEATURES = (
    "log_flops", "log_bytes_read", "log_bytes_written", "log_weight_bytes", "log_intensity", "log_inputs",
    "log_outputs", "log_batch", "log_rows", "log_columns", "log_depth", "log_window", "stride", "log_groups",
    "log_columns_in_group", "log_channels_in_group", "aligned", "last_dimension", "inputs", "dtype_bytes",
    "log_fused", "fused_functions", "fused_inputs",
    "log_roofline_ns", "log_balance", "log_peak", "log_bandwidth", "log_units",
    *(f"is_{kind}" for kind in _KIND_NAMES),
)  # fmt: skip


def kind_of(facts: OpFacts) -> str:
    """Return the kind of an op by its type; convolutions are divided by window and groups."""
    if facts.op_type not in ("Conv", "ConvTranspose", "FusedConv", "ConvInteger"):
        return _KIND_OF.get(facts.op_type, "other")
    if integer(facts.attributes.get("group"), 1) > 1:
        return "depthwise" if channels_in_group(facts) == 1 else "grouped"
    return "pointwise" if window(facts) == 1 else "conv"


def feature_matrix(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the features of ops on a share of a device.

    Returns
    -------
    ndarray of shape (len(ops), len(FEATURES))
    """
    roofline = roofline_ns(ops, device, share)
    fraction = device.fraction(share)
    of_op = np.array([_op_features(facts) for facts in ops]).reshape(len(ops), -1)
    flops = np.array([facts.flops for facts in ops])
    traffic = np.array([facts.bytes_read + facts.bytes_written for facts in ops])
    peak = device.flops_per_s["float32"] * fraction
    width = bandwidth(device, share)
    shared = np.column_stack(
        [
            np.log(roofline + 1.0),
            np.log((flops + 1.0) / peak) - np.log((traffic + 1.0) / width),
            np.full(len(ops), math.log(peak)),
            np.full(len(ops), math.log(width)),
            np.full(len(ops), math.log(device.compute_units * fraction)),
        ]
    )
    kinds = np.array([[float(kind_of(facts) == kind) for kind in _KIND_NAMES] for facts in ops])
    return np.hstack([of_op, shared, kinds.reshape(len(ops), -1)])


def roofline_ns(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the least time of each op in nanoseconds."""
    work = GraphWork(
        tuple(facts.op_type for facts in ops),
        tuple(facts.dtype for facts in ops),
        np.array([facts.flops for facts in ops]),
        np.array([facts.bytes_read + facts.bytes_written for facts in ops]),
        (),
        0.0,
        0,
    )
    return op_times_s(work, device, share) * 1e9


def _op_features(facts: OpFacts) -> list[float]:
    traffic = facts.bytes_read + facts.bytes_written
    rows, columns, depth = _as_matrix(facts)
    group = max(1, integer(facts.attributes.get("group"), 1))
    inputs = sum(prod(shape) for shape in facts.inputs)
    outputs = sum(prod(shape) for shape in facts.outputs)
    return [
        math.log1p(facts.flops),
        math.log1p(facts.bytes_read),
        math.log1p(facts.bytes_written),
        math.log1p(facts.weight_bytes),
        math.log1p(facts.flops / (traffic + 1.0)),
        math.log1p(inputs),
        math.log1p(outputs),
        math.log(facts.batch),
        math.log1p(rows),
        math.log1p(columns),
        math.log1p(depth),
        math.log(window(facts)),
        float(max(integers(facts.attributes.get("strides")), default=1)),
        math.log(group),
        math.log1p(columns / group),
        math.log1p(channels_in_group(facts)),
        float(columns % _LANES == 0) + float(channels_in_group(facts) % _LANES == 0),
        math.log1p(facts.outputs[0][-1] if facts.outputs and facts.outputs[0] else 1),
        float(len(facts.inputs)),
        traffic / max(1.0, inputs + outputs),
        math.log(facts.fused),
        float(facts.fused_functions),
        float(facts.fused_inputs),
    ]


def _as_matrix(facts: OpFacts) -> tuple[float, float, float]:
    """Return a convolution or matrix product as a product: rows, columns, depth; for other ops the output's shape."""
    out = facts.outputs[0] if facts.outputs else ()
    if facts.op_type in MATRIX_OPS and out and facts.flops:
        columns = out[1] if "Conv" in facts.op_type and len(out) > 1 else out[-1]
        rows = prod(out) / max(1, columns)
        return rows, float(columns), facts.flops / (2.0 * max(1.0, rows * columns))
    return float(prod(out[:-1])), float(out[-1]) if out else 1.0, 0.0


#: Time of a runtime per node without work.
NODE_NS = 2000.0
#: Names of the columns of `expected_features`.
EXPECTED_FEATURES = ("log_expected_ns", "log_arithmetic_part", "log_traffic_part")


def regressor_features(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the features of ops for the regressors, those of their expected times last.

    Returns
    -------
    ndarray of shape (len(ops), len(FEATURES) + len(EXPECTED_FEATURES))
    """
    return np.hstack([feature_matrix(ops, device, share), expected_features(ops, device, share)])


def expected_features(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the logarithm of the expected time in nanoseconds and its parts for each op, shape (len(ops), 3)."""
    if device.kind == "cpu":
        flops = np.array([facts.flops for facts in ops], dtype=float)
        arithmetic_ns = flops / (device.flops_per_s["float32"] * device.fraction(share)) * 1e9
        traffic_ns = _traffic_s(ops, device, share) * 1e9
    else:
        arithmetic_ns, traffic_ns = roofline_ns(ops, device, share), np.zeros(len(ops))
    expected = NODE_NS + arithmetic_ns + traffic_ns
    parts = [np.log((part_ns + 1.0) / expected) for part_ns in (arithmetic_ns, traffic_ns)]
    return np.column_stack([np.log(expected), *parts])


def expected_ns(features: Array) -> Array:
    """Return the expected times in nanoseconds of N ops from their features of `regressor_features`, shape (N,)."""
    return np.asarray(np.exp(features[:, -len(EXPECTED_FEATURES)]))


def _traffic_s(ops: Sequence[OpFacts], device: Device, share: Share) -> Array:
    """Return the time of each op's traffic: weights are reused after a whole run, other tensors within the op."""
    weights = np.array([facts.weight_bytes for facts in ops], dtype=float)
    total = np.array([facts.bytes_read + facts.bytes_written for facts in ops], dtype=float)
    activations = np.maximum(total - weights, 0.0)
    since_last_run = np.array([facts.working_set for facts in ops], dtype=float)
    return np.asarray(
        weights / reread_bandwidth(device, share, since_last_run) + activations / reread_bandwidth(device, share, total)
    )


Graphs = Callable[[str, int], ModelGraph | None]

_Row = TypeVar("_Row", OpRow, ModelRow)
_Key = tuple[str, int, float, str | None]
#: Position of each op with a time of its own → positions of all ops executed with it, its own included.
Groups = Mapping[int, tuple[int, ...]]

_FUSED_INTO = "fused into "
#: Name of Mreq among the requirements; the others are metrics of Creq.
MREQ = "memory"


def optimized_groups(graph: ModelGraph) -> Groups | None:
    """Return the groups made by ONNX Runtime's own optimizer from the graph's file on a CPU; None where unknown."""
    try:
        nodes = executed_nodes(Path(graph.path)) if Path(graph.path).is_file() else None
    except InputError:
        return None
    if nodes is None:
        return None
    groups = (tuple(sorted(group.ops)) for group in tie_nodes(graph, nodes).groups)
    return {find_costliest(group, graph.ops): group for group in groups}


def measured_groups(graph: ModelGraph, rows: Sequence[OpRow]) -> Groups | None:
    """Return the groups executed together when the rows of ``ops`` of this graph were measured.

    ``rows``: in the order of the graph's ops; None is returned if they belong to another graph.
    """
    if [row.name for row in rows] != [op.name for op in graph.ops]:
        return None
    position = {op.name: place for place, op in enumerate(graph.ops)}
    groups = {place: [place] for place, row in enumerate(rows) if row.duration_p50_ns is not None}
    for place, row in enumerate(rows):
        note = row.note or ""
        anchor = position.get(note.removeprefix(_FUSED_INTO)) if note.startswith(_FUSED_INTO) else None
        if anchor in groups:
            groups[anchor].append(place)
    return {anchor: tuple(sorted(group)) for anchor, group in groups.items()}


def group_facts(graph: ModelGraph, groups: Groups) -> list[OpFacts]:
    """Return the facts of each group: of the op charged with the group's time, and of the ops fused into it."""
    maker = {tensor.name: place for place, op in enumerate(graph.ops) for tensor in op.outputs}
    touched = working_set_bytes(graph)
    return [replace(_facts(graph, anchor, group, maker), working_set=touched) for anchor, group in groups.items()]


def working_set_bytes(graph: ModelGraph) -> float:
    """Return the bytes that an execution of the model touches: weights, and the largest size of live activations."""
    return float(graph.weight_bytes + peak_activation_bytes(graph))


def _facts(graph: ModelGraph, anchor: int, group: tuple[int, ...], maker: Mapping[str, int]) -> OpFacts:
    followers = [graph.ops[place] for place in group if place != anchor]
    anchor_inputs = {tensor.name for tensor in graph.ops[anchor].inputs}
    more = {
        tensor.name
        for op in followers
        for tensor in op.inputs
        if tensor not in op.weights and tensor.name not in anchor_inputs and maker.get(tensor.name) not in group
    }
    return replace(
        facts_of_op(graph.ops[anchor], graph.batch),
        fused=len(group),
        fused_functions=sum(op.op_type in KINDS["function"] for op in followers),
        fused_inputs=len(more),
    )


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Executed ops and their times."""

    features: Array  #: Shape (N, F). `regressor_features`.
    times_ns: Array  #: Shape (N,).
    least_ns: Array  #: Shape (N,). Roofline.
    groups: tuple[str, ...]  #: Architecture.


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A model measured at a batch and share."""

    graph: ModelGraph  #: The graph at that batch.
    share: Share
    latency_ms: float
    memory_bytes: float | None
    roofline_ms: float
    architecture: str  #: The first name of all models with nearly the same ops (`name_architectures`).
    #: Creq in percent by metric, and Mreq in bytes, where measured on the whole device.
    requirements: Mapping[str, float]
    launched: Mapping[str, float]  #: Creq in percent by metric, predicted from launches; empty where not measured.


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """All measurements of a device."""

    device: Device
    ops: OpTimes | None  #: None where no op was measured.
    cases: tuple[ModelCase, ...]
    data_hash: str  #: Hash of the rows, independent of the order of their measurement.

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the architectures, sorted."""
        return tuple(sorted({case.architecture for case in self.cases}))


def load_training_set(db: KernelDb, device: Device, graphs: Graphs) -> TrainingSet:
    """Return all measurements on ``device``.

    Raises `InputError` when neither ops nor Creq were measured on the device, or no measured model has its file.
    ``graphs``: name of a model in the database and batch size → its graph, None where the file is gone.
    """
    rows = _last(comparable_rows(read_records(db, OpRow, {"device": device.name})))
    measured = comparable_rows(read_records(db, ModelRow, {"device": device.name, "processes": 1}))
    models = _last([row for row in measured if _latency_ms(row) and row.error is None])
    if not (rows or any(row.wavg_occupancy_pct is not None for row in models)):
        raise InputError(f"no ops were measured on {device.name}", "gpuprof profile MODEL.onnx on that device")
    if not models:
        raise InputError(
            f"no latency was measured on {device.name}", "in reports, mark runs by ranges that wait for their kernels"
        )
    by_case: dict[_Key, list[OpRow]] = {}
    for row in sorted(rows, key=lambda row: row.position):
        by_case.setdefault(_key(row), []).append(row)
    keyed_cases = [(_key(row)[:2], _case(row, device, graphs)) for row in models]
    names = name_architectures([case.graph for _, case in keyed_cases if case is not None])
    cases = tuple(replace(case, architecture=names[case.graph.name]) for _, case in keyed_cases if case is not None)
    if not cases:
        raise InputError("the ONNX files of the measured models are gone", "put them back, or profile again")
    graphs_by_key = {at: case.graph for at, case in keyed_cases if case is not None}
    timed = [
        replace(op, model=names.get(op.model, op.model))
        for key, ops in sorted(by_case.items(), key=str)
        for op in _select_timed(ops, graphs_by_key.get(key[:2]))
    ]
    ops = _op_times(timed, device) if rows else None
    hashed: list[OpRow | ModelRow] = [*rows, *models]
    lines = sorted(json.dumps(asdict(row), sort_keys=True, default=str) for row in hashed)
    data_hash = hashlib.sha256("\n".join([",".join(FEATURES), *lines]).encode()).hexdigest()
    return TrainingSet(device, ops, cases, data_hash)


def leave_out_architecture(data: TrainingSet, architecture: str) -> TrainingSet:
    """Return the data without an architecture; ``ops`` is None where only its ops were measured."""
    ops = data.ops
    if ops is not None:
        mask = np.array([group != architecture for group in ops.groups])
        groups = tuple(group for group in ops.groups if group != architecture)
        ops = OpTimes(ops.features[mask], ops.times_ns[mask], ops.least_ns[mask], groups) if groups else None
    cases = tuple(case for case in data.cases if case.architecture != architecture)
    return TrainingSet(data.device, ops, cases, data.data_hash)


def graph_facts(graph: ModelGraph) -> list[OpFacts]:
    """Return the facts of every op of a graph."""
    return [facts_of_op(op, graph.batch) for op in graph.ops]


@dataclass(frozen=True, slots=True)
class _TimedOp:
    """A measured op, alone or with the ops fused into it."""

    model: str
    share: Share
    signature: str
    facts: OpFacts
    time_ns: float

    @property
    def kind(self) -> tuple[object, ...]:
        """Key common to all executions of an op, which form a single training example."""
        fusion = self.facts.fused, self.facts.fused_functions, self.facts.fused_inputs
        return self.model, str(self.share), self.signature, *fusion


def _select_timed(rows: Sequence[OpRow], graph: ModelGraph | None) -> list[_TimedOp]:
    """Return the timed ops of a workload; fused ops are known where the graph is available."""
    groups = measured_groups(graph, rows) if graph is not None else None
    facts = dict(zip(groups, group_facts(graph, groups), strict=True)) if graph is not None and groups else {}
    return [
        _TimedOp(
            row.model,
            Share(row.sm_share_pct, row.mig_profile),
            row.signature,
            facts.get(place) or facts_of_row(row),
            float(row.duration_p50_ns),
        )
        for place, row in enumerate(rows)
        if row.duration_p50_ns
    ]


def _op_times(timed: Sequence[_TimedOp], device: Device) -> OpTimes:
    """Return executed ops; equal ops of an architecture are merged, with the median of their times."""
    same: dict[tuple[object, ...], list[_TimedOp]] = {}
    for op_time in timed:
        same.setdefault(op_time.kind, []).append(op_time)
    if not same:
        raise InputError(f"no op has a time on {device.name}", "gpuprof profile MODEL.onnx on that device")
    features, least, times, groups = [], [], [], []
    for share in sorted({op.share for op in timed}, key=str):
        alike = [repeats for _, repeats in sorted(same.items(), key=str) if repeats[0].share == share]
        facts = [repeats[0].facts for repeats in alike]
        features.append(regressor_features(facts, device, share))
        least.append(roofline_ns(facts, device, share))
        times.append([float(np.median([op.time_ns for op in repeats])) for repeats in alike])
        groups += [repeats[0].model for repeats in alike]
    return OpTimes(np.vstack(features), np.concatenate(times), np.concatenate(least), tuple(groups))


def _case(row: ModelRow, device: Device, graphs: Graphs) -> ModelCase | None:
    graph = graphs(*_key(row)[:2])
    if graph is None:
        return None
    share = Share(row.sm_share_pct, row.mig_profile)
    least = float(roofline_ns(graph_facts(graph), device, share).sum()) / 1e6
    columns = {**CREQ_METRICS, MREQ: "memory_peak_bytes"}.items()
    requirements = {
        name: float(value) for name, column in columns if share == Share() and (value := getattr(row, column))
    }
    latency_ms = _latency_ms(row) or 0.0
    launched = predict_graph(graph, device) if requirements.keys() - {MREQ} else {}
    return ModelCase(graph, share, latency_ms, row.memory_peak_bytes, least, graph.name, requirements, launched)


def _latency_ms(row: ModelRow) -> float | None:
    return row.latency_mean_ms if row.latency_p50_ms is None else row.latency_p50_ms


def _last(rows: Sequence[_Row]) -> list[_Row]:
    """Return for each workload the rows of the last run."""
    last: dict[_Key, str] = {}
    for row in rows:
        key = _key(row)
        last[key] = max(last.get(key, ""), row.run_id)
    return [row for row in rows if row.run_id == last[_key(row)]]


def _key(row: OpRow | ModelRow) -> _Key:
    return model_at_dims(row.model, row.dims), row.batch, row.sm_share_pct, row.mig_profile


def database_graphs(db: KernelDb) -> Graphs:
    """Return a reader of the graphs of the database's models, at sizes or not, by their recorded paths."""
    from gpuprof.graph.load import load_graph

    table = sorted(read_records(db, ModelRow), key=lambda row: row.run_id)
    paths = {row.model: row.model_path for row in table if row.model_path}

    def graph(model: str, batch: int) -> ModelGraph | None:
        name, sizes = split_name(model)
        path = Path(paths.get(name, ""))
        if not path.is_file():
            return None
        try:
            return load_graph(path, batch, name, dict(sizes))
        except InputError:
            return None

    return graph


def name_architectures(graphs: Iterable[ModelGraph]) -> Mapping[str, str]:
    """Return for each model's name the alphabetically first name of its architecture.

    Two models share an architecture where nine tenths of all their ops, all but a replaced head, have type, attributes
    and shapes of weights in common, regardless of names, values of weights, batch and sizes of free dimensions.
    """
    contents: dict[str, Counter[str]] = {}
    for graph in graphs:
        contents.setdefault(graph.name, Counter(map(_describe_op, graph.ops)))
    names: dict[str, str] = {}
    for name in sorted(contents):
        ops = contents[name]
        pairs = ((first, contents[first]) for first in dict.fromkeys(names.values()))
        alike = (first for first, its in pairs if (its & ops).total() >= 0.9 * (its | ops).total())
        names[name] = next(alike, name)
    return names


def _describe_op(op: Op) -> str:
    weights = [(weight.dtype, weight.shape) for weight in op.weights]
    return json.dumps([op.domain, op.op_type, dict(op.attributes), weights], sort_keys=True, default=str)
