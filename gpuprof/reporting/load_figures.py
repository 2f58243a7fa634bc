"""Figures of a load test beyond goodput and percentiles: where the time went, and how large batches were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuprof.reporting.chart import Axis, Chart, group_bars, stack_bars

#: Stages of a served request, in the order in which it passes them.
_STAGES = ("router", "queue", "gather", "infer", "scatter")
_LABELS = {"router": "network and router", "infer": "model"}


def load_stage_figure(rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Return where the time of a mean request went, by model; None where the server kept no statistics."""
    known = [row for row in rows if (row.get("stages") or {}).get("infer_ms") is not None]
    if not known:
        return None
    names = tuple(row["model"] for row in known)
    parts = {
        _LABELS.get(stage, stage): [max(0.0, row["stages"].get(f"{stage}_ms") or 0.0) for row in known]
        for stage in _STAGES
    }
    boxes = stack_bars(names, parts, "ms", tuple(range(len(_STAGES))))
    return Chart("Mean latency by stage", Axis("model", names=names), Axis("latency in ms", low=0.0), boxes=boxes)


def batch_figure(rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Return what part of the batches had which size, by model; None where the server kept no statistics."""
    known = {row["model"]: _sizes(row) for row in rows if (row.get("stages") or {}).get("batches")}
    sizes = sorted({size for own in known.values() for size in own})
    if not sizes:
        return None
    parts = {model: [100.0 * own.get(size, 0) / sum(own.values()) for size in sizes] for model, own in known.items()}
    names = tuple(str(size) for size in sizes)
    boxes = group_bars(names, parts, "%")
    return Chart("Batches by size", Axis("batch size", names=names), Axis("batches in %", low=0.0), boxes=boxes)


def _sizes(row: Mapping[str, Any]) -> dict[int, int]:
    return {int(size): int(count) for size, count in row["stages"]["batches"].items()}
