"""Merges models of a plan that share a device and weights, and plans each merged model as one model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.domain.demand import join_demands
from gpuprof.domain.deployment import DeploymentMap, ModelFile, RequestedModel
from gpuprof.domain.sojourn import ModelQueues
from gpuprof.errors import GpuprofError, InputError
from gpuprof.graph.file import read_onnx
from gpuprof.pipeline.problem import plan_map
from gpuprof.placement.problem import Problem
from gpuprof.rules.merged_estimate import estimate_merged

if TYPE_CHECKING:
    from gpuprof.domain.device import Device
    from gpuprof.merging.pipeline import MergedInMemory
    from gpuprof.placement.policies import Policy

_LONGEST_NAME = 80


class MapMerger:
    """Merges sets of models that share a device and weights, one after another, where the plan gets no worse.

    The merged files are written to the folder of ``output``, the future path of the map. Models whose merge cannot be
    planned within the tightest of their SLOs, saves nothing or fails stay separate, with the reason. ``problem`` and
    ``deployment`` have each merged model in place of its members.
    """

    def __init__(self, problem: Problem, policy: Policy, deployment: DeploymentMap, output: Path) -> None:
        self.problem, self.deployment = problem, deployment
        self._estimator = problem.estimator
        self._policy, self._output = policy, output

    def run(self) -> Iterator[str]:
        """Merge what is worthwhile, and yield a line on each decision.

        Raises `InputError` when the files cannot be written.
        """
        tried_groups: set[tuple[str, ...]] = set()
        for device, batches in _list_shared_devices(self.deployment):
            models = tuple(m for m in batches if (model := self.deployment.models.get(m)) and not model.members)
            if len(models) > 1 and models not in tried_groups:
                tried_groups.add(models)
                yield from self._merge_group(models, batches, self.problem.device(device))

    def _merge_group(self, models: Sequence[str], batches: Mapping[str, int], device: Device) -> Iterator[str]:
        from gpuprof.merging.gain import device_rates
        from gpuprof.merging.pipeline import MergeOptions, propose_merges, read_sources

        files = {}
        for model in models:
            path = self.deployment.models[model].path
            if path is None or not Path(path).is_file():
                yield f"{model} is not merged: its ONNX file is not there"
                continue
            try:
                read_sources([Path(path)])
                files[model] = Path(path)
            except InputError as error:
                yield f"{model} is not merged: {error.message}"
        if len(files) < 2:
            yield from (f"{model} is not merged: no other model here can be merged with it" for model in files)
            return
        options = MergeOptions(rates=device_rates(device), batches=batches)
        proposals = propose_merges(list(files.values()), options, list(files))
        yield from (f"{model} is not merged: {reason}" for model, reason in proposals.left_out)
        for proposal in proposals.merges:
            names = " and ".join(proposal.report.models)
            if reason := self._place_merge(proposal):
                yield f"{names} are not merged: {reason}"
                continue
            report = proposal.report
            once, shared = (sum(len(row.operators) for row in rows) for rows in (report.merged, report.shared))
            yield (
                f"{names} are merged: {once} operators run together, {shared} on shared weights, "
                f"{report.saved_bytes / 2**20:.1f} MiB of weights less, for each process"
            )

    def _place_merge(self, proposal: MergedInMemory) -> str | None:
        """Write a merged file and plan with it; on failure return the reason and leave no file."""
        if isinstance(self.problem.queueing, ModelQueues):
            return "of how requests of several models arrive together the trace says nothing"
        name = _choose_name(proposal.report.models, self.deployment)
        file = self._output.parent / f"{self._output.stem}-{re.sub(r'[^A-Za-z0-9.+_-]', '_', name)}.onnx"
        try:
            proposal.write(file)
            reason = self._plan_anew(name, proposal, file)
        except InputError:
            raise
        except GpuprofError as error:
            reason = error.message
        if reason:
            for path in (file, file.with_name(f"{file.name}.data")):
                path.unlink(missing_ok=True)
        return reason

    def _plan_anew(self, name: str, proposal: MergedInMemory, file: Path) -> str | None:
        before, members = self.deployment, set(proposal.report.models)
        demands = [demand for demand in self.problem.demands if demand.model in members]
        fields = set(RequestedModel.model_fields)
        requested = {
            demand.model: RequestedModel(**before.models[demand.model].model_dump(include=fields)) for demand in demands
        }
        joined = join_demands(name, demands)
        merged = ModelFile(str(file), read_onnx(file).sha256, requested, max(0, proposal.report.saved_bytes))
        problem = replace(
            self.problem,
            demands=(*(demand for demand in self.problem.demands if demand.model not in members), joined),
            files={**self.problem.files, name: merged},
        )
        problem = replace(problem, estimator=estimate_merged(self._estimator, problem.files))
        planned = plan_map(problem, self._policy)
        if reason := _explain_worse(planned, before):
            return reason
        self.problem, self.deployment = problem, planned
        return None


def _list_shared_devices(deployment: DeploymentMap) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the kind of each device with several models, and the largest batch of each of these models."""
    for node in deployment.nodes:
        for gpu in node.gpus:
            batches: dict[str, int] = {}
            for replica in (replica for partition in gpu.partitions for replica in partition.replicas):
                batches[replica.model] = max(replica.batch, batches.get(replica.model, 0))
            if len(batches) > 1:
                yield gpu.device, batches


def _explain_worse(planned: DeploymentMap, before: DeploymentMap) -> str | None:
    """Return the reason why a plan with a merged model is worse than before; None if it is not worse."""
    missing = {demand.model: demand.reason for demand in before.unplaced}
    for demand in planned.unplaced:
        if demand.model not in missing:
            return f"as one, {demand.rate_rps:.4g} requests/s of {demand.model} cannot be served: {demand.reason}"
    more, less = planned.predicted, before.predicted
    if more.gpus > less.gpus or (more.cost_per_hour or 0.0) > (less.cost_per_hour or 0.0):
        return f"as one they need {more.gpus} devices in place of {less.gpus}"
    return None


def _choose_name(members: Sequence[str], deployment: DeploymentMap) -> str:
    """Return the name of a merge in the map: its models' names, or a number if those are too long or taken."""
    names, name, count = {*deployment.models, *deployment.requested}, "+".join(members), 0
    while name in names or len(name) > _LONGEST_NAME:
        name, count = f"merged-{count}", count + 1
    return name
