"""Proposals for merging models that share a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.merging.architecture import count_graph, group_architectures
from gpuprof.merging.pipeline import (
    MergedInMemory,
    MergeOptions,
    merge_sources,
    read_sources,
    write_merged,
)
from gpuprof.merging.report import MergeReport
from gpuprof.merging.source import SourceModel


@dataclass(frozen=True, slots=True)
class MergeProposal:
    """Models that share weights and are predicted to run faster as a merged graph than as separate graphs."""

    models: tuple[str, ...]  #: Names in the merged model.
    paths: tuple[Path, ...]
    merged: MergedInMemory  #: The merged model in memory.
    options: MergeOptions

    @property
    def report(self) -> MergeReport:
        """Report of the merge; writing adds the proof."""
        return self.merged.report

    def write(self, output: Path) -> MergeReport:
        """Prove the merged model, write it to ``output`` and return its report.

        Raises `InfeasibleError` when outputs differ from the originals' by more than the tolerance; `InputError` when
        ``output`` cannot be written.
        """
        return write_merged(self.merged, output, self.options)


@dataclass(frozen=True, slots=True)
class Proposals:
    """The proposed merges, and the reasons for leaving other models out."""

    merges: tuple[MergeProposal, ...]  #: Disjoint sets of models.
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
    merges: list[MergeProposal] = []
    unmerged: dict[str, str] = {}
    for group in group_architectures([count_graph(source) for source in sources], chosen.eps):
        members = [sources[i] for i in group]
        if len(members) == 1:
            unmerged[members[0].name] = "no other model has an architecture like it"
            continue
        proposals = _propose(members, chosen, unmerged)
        merges += proposals
    return Proposals(tuple(merges), tuple(unmerged.items()))


def _propose(members: Sequence[SourceModel], options: MergeOptions, unmerged: dict[str, str]) -> list[MergeProposal]:
    merged = merge_sources(members, options)
    proposals = []
    for names in _sharing(merged.report):
        chosen = [source for source in members if source.name in names]
        part = merge_sources(chosen, options) if len(chosen) < len(members) else merged
        proposals.append(MergeProposal(tuple(s.name for s in chosen), tuple(s.path for s in chosen), part, options))
    found = {name for proposal in proposals for name in proposal.models}
    for source in members:
        if source.name not in found:
            unmerged[source.name] = _why(merged.report, source.name)
    return proposals


def _sharing(report: MergeReport) -> list[set[str]]:
    """Return the sets of models that share operators, directly or through other models."""
    sets: list[set[str]] = []
    for row in (*report.merged, *report.shared):
        mine = set(row.models)
        for other in [known for known in sets if known & mine]:
            mine |= other
            sets.remove(other)
        sets.append(mine)
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
