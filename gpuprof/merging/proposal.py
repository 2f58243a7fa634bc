"""Proposals for merging models that share a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.merging.architecture import count_graph, group_architectures
from gpuprof.merging.pipeline import MergedInMemory, MergeOptions, merge_sources, read_sources
from gpuprof.merging.report import MergeReport


@dataclass(frozen=True, slots=True)
class Proposals:
    """The proposed merges, and the reasons for leaving other models out."""

    #: Models that share weights and are predicted to run faster as one graph; disjoint.
    merges: tuple[MergedInMemory, ...]
    left_out: tuple[tuple[str, str], ...]  #: (model, reason) of every other model.


def propose_merges(
    models: Sequence[Path], options: MergeOptions | None = None, names: Sequence[str] | None = None
) -> Proposals:
    """Return the merges among models that share a device.

    Models are grouped by architecture; within a group, models that share operators worth merging form a proposal.
    ``models``: ONNX files; a file listed twice is merged with itself; ``names``: their names in the merged model, by
    default the files' stems. Raises `InputError` when a file is no valid model, or has free dimensions other than its
    batch.
    """
    chosen = options or MergeOptions()
    sources = read_sources(models, chosen.dims, names)
    merges: list[MergedInMemory] = []
    left_out: dict[str, str] = {}
    for group in group_architectures([count_graph(source) for source in sources], chosen.eps):
        if len(group) == 1:
            left_out[sources[group[0]].name] = "no other model has an architecture like it"
            continue
        whole = merge_sources([sources[i] for i in group], chosen)
        sets = _sharing(whole.report)
        for sharing in sets:
            part = [sources[i] for i in group if sources[i].name in sharing]
            merges.append(whole if len(part) == len(group) else merge_sources(part, chosen))
        shared = set[str]().union(*sets)
        left_out |= {name: _why(whole.report, name) for name in whole.report.models if name not in shared}
    return Proposals(tuple(merges), tuple(left_out.items()))


def _sharing(report: MergeReport) -> list[set[str]]:
    """Return the sets of models that share operators, directly or through other models."""
    sets: list[set[str]] = []
    for row in (*report.merged, *report.shared):
        sharing = set(row.models)
        for other in [members for members in sets if members & sharing]:
            sharing |= other
            sets.remove(other)
        sets.append(sharing)
    return sets


def _why(report: MergeReport, name: str) -> str:
    """Return the reason of the operator closest to being merged."""
    rows = [row for row in report.operators if name in row.models]
    if not rows:
        return "it has no weighted operators"
    nearest = max(rows, key=lambda row: (len(row.models), row.similarity or 0.0))
    if len(nearest.models) > 1:
        return f"{nearest.operators[0]}: {nearest.reason}"
    reasons = sorted({row.reason for row in rows})
    return reasons[0]
