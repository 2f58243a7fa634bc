"""``check``: whether a deployment map, from any tool, keeps every rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpuprof.domain.demand import Demand, Slo, name_demand
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.estimate import is_unstable
from gpuprof.domain.map_sources import describe_basis
from gpuprof.errors import InfeasibleError, InputError, UnavailableError
from gpuprof.estimators.builtin import estimator_names
from gpuprof.graph.load import read_fixed_batch
from gpuprof.machine.gpu_share import find_live_faults
from gpuprof.pipeline.arguments import (
    DemandsArgument,
    MapArgument,
    find_changed,
    locate_files,
    map_folder,
    map_label,
    model_paths,
    resolve_demands,
    resolve_map,
)
from gpuprof.pipeline.place import describe_routers
from gpuprof.pipeline.recorded_problem import OtherTimes, collect_map_evidence
from gpuprof.pipeline.result import NoteCallback, NoteList, Result, say_nothing
from gpuprof.pipeline.settings import option
from gpuprof.placement import feasibility
from gpuprof.placement.chains import expand_chains
from gpuprof.placement.feasibility import Violation
from gpuprof.plugins import identify
from gpuprof.runtime.batch_items import describe_mixing, find_mixed_output
from gpuprof.runtime.child_process import CrashError
from gpuprof.runtime.optimizer import find_refusal
from gpuprof.serving.plan.serving_plan import chosen_node


@dataclass(frozen=True, kw_only=True)
class CheckResult(Result):
    """The rules broken by a map; a sound map breaks none."""

    label: str
    deployment: DeploymentMap
    violations: tuple[Violation, ...]
    believes_times: bool  #: Whether the times written in the map were not compared with an estimator's.

    @property
    def is_sound(self) -> bool:
        """Whether the map breaks no rule."""
        return not self.violations

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each broken rule: the rule, the place, and the fault."""
        return [asdict(violation) for violation in self.violations]

    def raise_if_broken(self) -> None:
        """Check that the map is sound.

        Raises `InfeasibleError` when the map breaks a rule.
        """
        if self.violations:
            count = len(self.violations)
            raise InfeasibleError(f"{self.label} breaks {count} {'rule' if count == 1 else 'rules'}")


class CheckOptions(OtherTimes):
    """Demands, files and estimator for the check of a map."""

    against: DemandsArgument | None = option(
        None, "CSV file of demands to check against, in place of those in the map.", metavar="FILE", panel="Options"
    )
    allow_changed: bool = option(False, "Accept model files that changed since the map was planned.", panel="Options")
    live: bool = option(
        False, "Check that this machine has the planned GPUs, MIG instances and shares.", panel="Options"
    )
    node: str | None = option(None, "Node of the map that this machine is, for --live.", panel="Options")


def check(
    deployment: MapArgument = Path("map.json"),
    options: CheckOptions | None = None,
    *,
    note: NoteCallback = say_nothing,
    **fields: Any,
) -> CheckResult:
    """Check geometry, shares, memory, rates and SLOs of a map.

    Raises `InputError` when a file is invalid.

    Parameters
    ----------
    options : CheckOptions, optional
        Fields may be given as keywords instead.

    Examples
    --------
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(20.0))
    >>> plan = gpuprof.place([demand], fleet="a100-40")
    >>> gpuprof.check(plan.deployment).is_sound
    True
    >>> stricter = [gpuprof.Demand("mlp", rate_rps=200.0, slo=gpuprof.Slo(0.001))]
    >>> [violation.rule for violation in gpuprof.check(plan.deployment, against=stricter).violations]
    ['slo']
    """
    notes = NoteList(note)
    chosen = CheckOptions.collect(options, fields)
    resolved, demands = resolve_map(deployment), None
    if chosen.against is not None:
        resolved, demands = _judge_chains_by(resolved, resolve_demands(chosen.against))
    evidence = collect_map_evidence(resolved, map_folder(deployment), chosen, demands, notes.add)
    planned_by = resolved.planned_with.estimator
    if planned_by not in estimator_names() and ":" not in planned_by:
        notes.add(f"the map names {planned_by!r} as its estimator, which gpuprof does not have")
    if evidence.estimator is None:
        name = identify(chosen.estimator or planned_by)
        notes.add(
            f"the estimator {name!r} cannot be asked here: what it stands on, or the estimator itself, is missing; "
            "the times and the memory written in the map are believed"
        )
    unstable = sum(is_unstable(replica.predicted.source) for *_, replica in resolved.places())
    if unstable:
        notes.add(f"{unstable} of {sum(1 for _ in resolved.places())} replicas rest on unstable rows")
    notes.add(*filter(None, (describe_basis(resolved), describe_routers(resolved))))
    violations = feasibility.check(resolved, evidence)
    if unknown := feasibility.find_unknown_memory(resolved, evidence):
        notes.add(f"nothing is known of the memory of {', '.join(unknown)}: whether it suffices was not checked")
    if chosen.live:
        faults = find_live_faults(chosen_node(resolved, chosen.node))
        violations = (*violations, *(Violation("machine", where, message) for where, message in faults))
    for name, message in _find_refusals(resolved, map_folder(deployment)):
        violations = (*violations, Violation("file", name, message))
    for name, message in find_changed(locate_files(resolved, map_folder(deployment))):
        if chosen.allow_changed:
            notes.add(message)
        else:
            violations = (*violations, Violation("file", name, message))
    return CheckResult(
        notes=notes.all(),
        label=map_label(deployment),
        deployment=resolved,
        violations=violations,
        believes_times=evidence.estimator is None,
    )


def _judge_chains_by(deployment: DeploymentMap, demands: Sequence[Demand]) -> tuple[DeploymentMap, Sequence[Demand]]:
    """Return the map with the chains of ``demands``, and the demands with their SLOs divided as in the map."""
    expanded, chains = expand_chains(demands)
    steps = {step for chain in chains.values() for step in chain.steps} & deployment.models.keys()
    divided = []
    for demand in expanded:
        if (name := name_demand(demand).model) in steps:
            planned = deployment.models[name]
            demand = replace(demand, slo=Slo(planned.slo_ms, planned.percentile))
        divided.append(demand)
    return deployment.model_copy(update={"chains": chains}), divided


def _find_refusals(deployment: DeploymentMap, base: Path) -> Iterator[tuple[str, str]]:
    """Yield the models whose files cannot be served as planned, and the reasons."""
    batched = {replica.model for *_, replica in deployment.places() if replica.batch > 1}
    batched -= {name for name, entry in deployment.models.items() if entry.members}  # joined from apart items
    on_gpu = any(not gpu.device.startswith("cpu") for _, gpu, _, _ in deployment.places())
    for name, path in model_paths(locate_files(deployment, base)).items():
        try:
            if refusal := find_refusal(path, on_gpu):
                yield name, str(refusal)
            elif name in batched and read_fixed_batch(path) is not None:
                yield name, f"{path} has no free batch, but the map gives it batches"
            elif name in batched and (output := find_mixed_output(path, in_child=True)) is not None:
                yield name, f"{describe_mixing(name, output)}; it must have batches of 1"
        except CrashError as error:
            yield name, str(error)
        except (InputError, UnavailableError):
            continue  # files that cannot be read are reported as changed
