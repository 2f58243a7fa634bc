"""Conversion of a map to a map in which models that share a device and weights are merged into one graph."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import GpuprofError, InputError

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.domain.device import Device
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.merging.proposal import MergeProposal, Proposals
    from gpuprof.placement.map_merger import MapMerger, PartitionIndex
    from gpuprof.placement.problem import Problem

_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class MergeOutcome:
    """A map with its merges, and a line for people on each merge and on each unmerged model."""

    deployment: DeploymentMap
    notes: tuple[str, ...]


def merge_replicas(
    problem: Problem, deployment: DeploymentMap, output: Path, db: KernelDb | None = None
) -> MergeOutcome:
    """Merge the models of a map that share a device and weights, wherever merging pays.

    The merged files are written to the folder of ``output``, the future path of the map. Models whose merge breaks an
    SLO, saves nothing or fails stay separate, with the reason. Measured op times come from ``db``. Raises `InputError`
    when the files cannot be written there.
    """
    from gpuprof.placement.map_merger import MapMerger, shared_spots

    merging, notes = MapMerger(problem, deployment), list[str]()
    for spot, models in shared_spots(deployment):
        notes += _merge_at_spot(merging, spot, models, output, db)
    if not notes:
        notes = ["nothing to merge: no two models share a device"]
    return MergeOutcome(merging.deployment, tuple(notes))


def _merge_at_spot(
    merging: MapMerger, spot: PartitionIndex, models: Sequence[str], output: Path, db: KernelDb | None
) -> Iterator[str]:
    gpu = merging.deployment.nodes[spot.node].gpus[spot.gpu]
    replicas = gpu.partitions[spot.partition].replicas
    batches = {model: max(r.batch for r in replicas if r.model == model) for model in models}
    files = {}
    for model in models:
        path = merging.deployment.models[model].path
        if path is None or not Path(path).is_file():
            yield f"{model} is not merged: its ONNX file is not there"
        else:
            files[model] = Path(path)
    candidates = _find_candidates(files, batches, merging.problem.device(gpu.device), db)
    yield from (f"{one.model} is not merged: {one.reason}" for one in candidates.refused)
    for candidate in candidates.merges:
        members, proposal = candidate.members, candidate.proposal
        reason = _place_merge(merging, spot, members, proposal, output)
        names = " and ".join(members)
        if reason:
            yield f"{names} are not merged: {reason}"
            continue
        report = proposal.report
        saved = report.weight_bytes_before - report.weight_bytes_after
        once, shared = (sum(len(row.operators) for row in rows) for rows in (report.merged, report.shared))
        yield (
            f"{names} are merged: {once} operators run together, {shared} on shared weights, "
            f"{saved / 2**20:.1f} MiB of weights less, for each process"
        )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A candidate merge: its models in the map, and their graph."""

    members: tuple[str, ...]
    proposal: MergeProposal


@dataclass(frozen=True, slots=True)
class _Refusal:
    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The merges worth trying, and why each other model is in none."""

    merges: tuple[_Candidate, ...]
    refused: tuple[_Refusal, ...]


def _find_candidates(
    files: Mapping[str, Path], batches: Mapping[str, int], device: Device, db: KernelDb | None
) -> _Candidates:
    from gpuprof.merging.gain import device_rates
    from gpuprof.merging.pipeline import MergeOptions, source_names
    from gpuprof.merging.proposal import propose_merges
    from gpuprof.pipeline.op_seconds import read_op_seconds

    readable, refused = dict(files), list[_Refusal]()
    # Anew without the models that cannot be merged: each of them may have kept others apart.
    while len(readable) > 1:
        named = dict(zip(source_names(list(readable.values())), readable, strict=True))
        options = MergeOptions(
            rates=device_rates(device),
            batches={name: batches[model] for name, model in named.items()},
            measured=read_op_seconds(db, device, list(readable.values())),
        )
        try:
            proposals = propose_merges(list(readable.values()), options)
        except InputError:
            wrong = list(_find_unreadable(readable))
            if not wrong:
                raise
        else:
            wrong = [replace(one, model=named[one.model]) for one in _find_fixed_batches(proposals)]
            if not wrong:
                refused += [_Refusal(named[name], reason) for name, reason in proposals.left_out]
                merges = (_Candidate(tuple(named[name] for name in one.models), one) for one in proposals.merges)
                return _Candidates(tuple(merges), tuple(refused))
        refused += wrong
        readable = {model: path for model, path in readable.items() if model not in {one.model for one in wrong}}
    alone = (_Refusal(model, "no other model here can be merged with it") for model in readable)
    return _Candidates((), (*refused, *alone))


def _find_unreadable(files: Mapping[str, Path]) -> Iterator[_Refusal]:
    from gpuprof.merging.pipeline import read_sources

    for model, path in files.items():
        try:
            read_sources([path])
        except InputError as error:
            yield _Refusal(model, error.message)


def _find_fixed_batches(proposals: Proposals) -> Iterator[_Refusal]:
    """Yield the models with a fixed batch: a queue cannot promise calls with requests of all merged models."""
    for proposal in proposals.merges:
        for member in proposal.merged.described.members:
            if member.fixed_batch is not None:
                why = f"its batch is fixed at {member.fixed_batch}, and requests could not share a call"
                yield _Refusal(member.name, why)


def _place_merge(
    merging: MapMerger, spot: PartitionIndex, members: Sequence[str], proposal: MergeProposal, output: Path
) -> str | None:
    """Write a merged file and put it into the map; on failure return the reason and leave no file."""
    from gpuprof.domain.deployment import Merge
    from gpuprof.placement.map_merger import MergeOffer

    name = _choose_name(members, merging.deployment)
    file = output.parent / f"{output.stem}-{re.sub(r'[^A-Za-z0-9.+_-]', '_', name)}.onnx"
    try:
        report = proposal.write(file)
    except InputError:
        raise
    except GpuprofError as error:
        return error.message
    merge = Merge(
        path=file.name,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        members=dict(zip(members, proposal.models, strict=True)),
        saved_weight_bytes=max(0, report.weight_bytes_before - report.weight_bytes_after),
    )
    before = merging.deployment
    reason = merging.accept(spot, MergeOffer(name, merge, file)) or _find_broken_rule(merging)
    if reason:
        # The offer is accepted before the rules are checked, since they are checked of a map.
        merging.deployment = before
        for path in (file, file.with_name(f"{file.name}.data")):
            path.unlink(missing_ok=True)
    return reason


def _find_broken_rule(merging: MapMerger) -> str | None:
    """Return the first rule broken by the map with its merges."""
    from gpuprof.placement.feasibility import check
    from gpuprof.placement.problem import collect_evidence

    broken = check(merging.deployment, collect_evidence(merging.problem))
    return str(broken[0]) if broken else None


def _choose_name(members: Sequence[str], deployment: DeploymentMap) -> str:
    """Return the map's name for a merge: its models, or a number where that name is too long or taken."""
    taken, name, count = {*deployment.models, *deployment.merges}, "+".join(members), 0
    while name in taken or len(name) > _LONGEST_NAME:
        name, count = f"merged-{count}", count + 1
    return name
