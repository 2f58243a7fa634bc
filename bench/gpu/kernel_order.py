"""Ties a recorded database's kernels to ops by their order and names, where ONNX Runtime's profile was not recorded.

    python -m bench.gpu.kernel_order OUT MODEL.onnx...      of bench/gpu/results/h200/gpuprof-db, into a database OUT

ONNX Runtime executes nodes in the same order on any provider, so the order of a CPU session is that of the GPU. Each
kernel's name tells the types of node it can belong to; a convolution ends with the kernel of its bias. A run is tied
only if its kernels give exactly the types of the executed nodes, in order, as those of networks of convolutions do;
the kernels of others stay untied. ``gpuprof estimate MODEL.onnx --device h200 --estimator gk --db OUT`` adds them up.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort

from gpuprof.domain.model import ModelGraph
from gpuprof.errors import InputError
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import TABLES, KernelRow, OpRow, RunRow, from_arrow
from gpuprof.kernel_db.store import KernelDb, Run
from gpuprof.profiling.cpu.op_rows import op_facts
from gpuprof.runtime.session import session_options

DATABASE = Path(__file__).parent / "results" / "h200" / "gpuprof-db"
_NOTE = "kernels tied to ops by their order and names (bench.gpu.kernel_order)"
#: Kernels of products, and of layouts and sums around them.
_PRODUCT = re.compile(r"gemm|conv|fprop|cutlass|nchwToNhwc|nhwcToNchw|splitK|enable_if|cask_plugin")
_BIAS = "op_generic_tensor_kernel"
_PRODUCTS = frozenset({"Gemm", "MatMul"})
_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})  # launch nothing
#: Patterns of other kernels, and the types of nodes that launch them.
_NODES: Mapping[str, frozenset[str]] = {
    "OP_Relu": frozenset({"Relu"}),
    "_Clip": frozenset({"Clip"}),
    "OP_Add": frozenset({"Add", "Sum"}),
    "pooling_fw": frozenset({"MaxPool", "AveragePool", "GlobalAveragePool"}),
    "detail::reduce_": frozenset({"ReduceMean", "GlobalAveragePool"}),
    "softmax_": frozenset({"Softmax"}),
}


def group_kernels(names: Sequence[str]) -> list[tuple[frozenset[str], list[int]]] | None:
    """Return the kernels of each node, as positions in ``names``, with its possible types; None: a name is unknown."""
    nodes: list[tuple[frozenset[str], list[int]]] = []
    product: list[int] = []
    for position, name in enumerate(names):
        types = next((types for pattern, types in _NODES.items() if pattern in name), None)
        if _BIAS in name:
            nodes.append((frozenset({"Conv"}), [*product, position]))
            product = []
        elif types is not None:
            nodes += [(_PRODUCTS, product)] if product else []
            nodes.append((types, [position]))
            product = []
        elif "OP_Div" in name and nodes and nodes[-1][0] == _NODES["detail::reduce_"] and not product:
            nodes[-1][1].append(position)  # a mean is a sum and a division
        elif _PRODUCT.search(name):
            product.append(position)
        else:
            return None
    return [*nodes, *([(_PRODUCTS, product)] if product else [])]


def executed_order(path: Path) -> list[tuple[str, str]]:
    """Return name and type of the nodes that ONNX Runtime executes, in its order, without a CPU's own fusions."""
    options = session_options(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.enable_profiling = True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder, "profile"))
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        session.run(None, random_inputs(load_graph(path, 1)))
        events = json.loads(Path(session.end_profiling()).read_text())
    ended = [event for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]
    return [(event["name"].removesuffix("_kernel_time"), event["args"]["op_name"]) for event in ended]


def tie_run(
    kernels: Sequence[KernelRow], executed: Sequence[tuple[str, str]], graph: ModelGraph
) -> list[KernelRow] | None:
    """Return a run's kernels with their ops; None: order and names do not decide."""
    nodes = group_kernels([kernel.name for kernel in kernels])
    launching = [node for node in executed if node[1] not in _VIEWS]
    if nodes is None or len(nodes) != len(launching):
        return None
    if any(kind not in types for (types, _), (_, kind) in zip(nodes, launching, strict=True)):
        return None
    ops = {op.name: op for op in graph.ops}
    tied = list(kernels)
    for (_, positions), (name, kind) in zip(nodes, launching, strict=True):
        op = ops.get(name)
        for position in positions:
            tied[position] = replace(
                tied[position], op_name=name, op_type=kind, op_signature=None if op is None else op.signature
            )
    return tied


def main(arguments: Sequence[str]) -> int:
    """Write the database and print how much of each workload's kernel time was tied."""
    output, *files = map(Path, arguments)
    source, target = KernelDb(DATABASE), KernelDb.create(output)
    orders = {load_graph(path, 1).sha256: (path, executed_order(path)) for path in files}
    tables: dict[str, dict[str, list[Any]]] = {}
    for name in TABLES:
        for row in from_arrow(name, source.read_table(name)):
            tables.setdefault(row.run_id, {}).setdefault(name, []).append(row)
    for rows in tables.values():
        run: RunRow = rows.pop("runs")[0]
        path, executed = orders.get(run.model_sha256 or "", (None, []))
        kernels = sorted(rows.pop("kernels", []), key=lambda row: (row.repeat, row.position))
        ops: list[OpRow] = []
        if path is not None and kernels and run.batch:
            graph = load_graph(path, run.batch, run.model)
            repeats = sorted({kernel.repeat for kernel in kernels})
            parts = [tie_run([row for row in kernels if row.repeat == turn], executed, graph) for turn in repeats]
            if all(part is not None for part in parts):
                kernels = [kernel for part in parts for kernel in part or ()]
                run = replace(run, notes="; ".join(filter(None, [run.notes, _NOTE])))
                ops = [_op_row(run, position, graph) for position in range(len(graph.ops))]
            total = sum(kernel.duration_ns or 0 for kernel in kernels)
            part = sum(kernel.duration_ns or 0 for kernel in kernels if kernel.op_signature)
            print(f"{run.model} at {run.batch} on {run.sm_share_pct:g}%: {100.0 * part / total:.1f}% of the time tied")
        target.append(Run(run, ops=ops, kernels=kernels, **rows))
    return 0


def _op_row(run: RunRow, position: int, graph: ModelGraph) -> OpRow:
    op = graph.ops[position]
    return OpRow(
        run_id=run.run_id,
        model=run.model or "",
        device=run.device,
        batch=run.batch or 0,
        sm_share_pct=run.sm_share_pct or 100.0,
        mig_profile=run.mig_profile,
        position=position,
        name=op.name,
        model_sha256=graph.sha256,
        **op_facts(op),
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(f"error: {error}")
