"""Makes rows of ``ops`` and ``kernels`` from the times of a model's nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from gpuprof.domain.model import Op, Tensor
from gpuprof.graph.executed_graph import find_costliest
from gpuprof.kernel_db.schema import KernelRow, OpRow
from gpuprof.profiling.cpu.node_times import GroupTime, NodeEvent, NodeTimes
from gpuprof.profiling.worker.job import Request

#: Runs with individually stored kernels.
KERNEL_REPEATS = 3


def op_rows(request: Request, times: NodeTimes) -> tuple[OpRow, ...]:
    """Return a row for each op of the model, in order; the costliest op of a fused node carries the node's time."""
    ops = request.job.graph.ops
    anchors: dict[int, GroupTime] = {}
    notes: dict[int, str] = {}
    for timed in times.groups:
        anchor = find_costliest(timed.group.ops, ops)
        anchors[anchor] = timed
        notes |= {position: f"fused into {ops[anchor].name}" for position in timed.group.ops if position != anchor}
        if len(timed.group.ops) > 1:
            notes[anchor] = "with " + ", ".join(ops[p].name for p in timed.group.ops if p != anchor)
    notes |= dict.fromkeys(times.tie.unexecuted, "not executed: a view, or computed when the model was loaded")
    return tuple(
        op_row(request, position, op, anchors.get(position), times.repeats, notes.get(position))
        for position, op in enumerate(ops)
    )


def op_row(request: Request, position: int, op: Op, timed: GroupTime | None, repeats: int, note: str | None) -> OpRow:
    """Return the row of an op; ``timed`` is None for an op without a time of its own."""
    return OpRow(
        **request.columns(),
        position=position,
        name=op.name,
        model_sha256=request.job.graph.sha256,
        **op_facts(op),
        fused=len(timed.group.ops) if timed else 1,
        duration_mean_ns=round(timed.mean_ns) if timed else None,
        duration_p50_ns=round(timed.p50_ns) if timed else None,
        duration_min_ns=timed.min_ns if timed else None,
        repeats=repeats if timed else None,
        note=note,
    )


def kernel_rows(request: Request, times: NodeTimes) -> tuple[KernelRow, ...]:
    """Return a row for each execution of a node in the last few runs of the model."""
    ops = request.job.graph.ops
    owner = {
        index: ops[find_costliest(timed.group.ops, ops)] for timed in times.groups for index in timed.group.executed
    }
    last = max((event.repeat for _, event in times.events), default=0)
    events = [(index, event) for index, event in times.events if event.repeat > last - KERNEL_REPEATS]
    origin = events[0][1].start_ns if events else 0
    rows = []
    turn: dict[int, int] = {}
    for index, event in events:
        op = owner.get(index)
        turn[event.repeat] = turn.get(event.repeat, -1) + 1
        row = node_kernel(request, event, turn[event.repeat], op)
        rows.append(replace(row, repeat=event.repeat, start_ns=event.start_ns - origin))
    return tuple(rows)


def node_kernel(request: Request, event: NodeEvent, position: int, op: Op | None) -> KernelRow:
    """Return the row of an execution of a node, which on a CPU stands for a kernel."""
    return KernelRow(
        **request.columns(),
        name=f"{event.provider.removesuffix('ExecutionProvider')}:{event.op_type}",
        position=position,
        op_signature=op.signature if op else None,
        op_type=op.op_type if op else None,
        op_name=op.name if op else None,
        duration_ns=event.duration_ns,
    )


def op_facts(op: Op) -> dict[str, Any]:
    """Return the columns of ``ops`` determined by the op itself, independent of device and runtime."""
    return {
        "op_type": op.op_type,
        "signature": op.signature,
        "shapes": shapes_text(op),
        "dtype": (op.inputs or op.outputs)[0].dtype if op.inputs or op.outputs else None,
        "attributes": json.dumps(op.attributes, default=str, sort_keys=True),
        "flops": op.flops,
        "bytes_read": op.bytes_read,
        "bytes_written": op.bytes_written,
        "weight_bytes": op.weight_bytes,
    }


def shapes_text(op: Op) -> str:
    """Return ``"1x3x224x224,64x3x7x7->1x64x112x112"``; a scalar is ``"()"``."""
    return f"{','.join(map(_shape, op.inputs))}->{','.join(map(_shape, op.outputs))}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "()"
