"""Which tensor of a merged file is whose: what the map says of its models, and the file's own description of them."""

from __future__ import annotations

from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap, Replica
from gpuprof.errors import InputError
from gpuprof.graph.merged_model import read_merged
from gpuprof.serving.router.merged_replica import PlannedMember


def planned_members(deployment: DeploymentMap, replica: Replica, base: Path) -> tuple[PlannedMember, ...]:
    """Return the models of a merged replica with their tensors; nothing for any other replica.

    Raises
    ------
    InputError
        When the map does not list them, the merged file is not there, is none, or lacks one of them.
    """
    if not replica.merged:
        return ()
    merge = deployment.merges[replica.model]
    file = next((found for found in (base / merge.path, Path(merge.path)) if found.is_file()), None)
    described = None if file is None else read_merged(file)
    if described is None:
        what = "no such file" if file is None else "it is not a merged model"
        raise InputError(f"model {replica.model!r}: cannot read {merge.path}: {what}", "place with --merge again")
    members = []
    for model in replica.rates():
        if model not in deployment.models:
            raise InputError(f"the map places {model!r}, which is not among its models")
        member = described.member(merge.members[model])
        inputs, outputs = (
            tuple((value.name, value.merged) for value in values) for values in (member.inputs, member.outputs)
        )
        members.append(PlannedMember(model, inputs, outputs, deployment.models[model].path))
    return tuple(members)
