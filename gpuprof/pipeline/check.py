"""``check``: whether a deployment map, from any tool, keeps every rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.estimate import is_unstable
from gpuprof.domain.map_sources import describe_basis
from gpuprof.errors import InfeasibleError
from gpuprof.pipeline.arguments import (
    DemandsArgument,
    MapArgument,
    PathArgument,
    map_folder,
    map_label,
    optional_path,
    resolve_demands,
    resolve_map,
)
from gpuprof.pipeline.model_files import find_changed, locate_files
from gpuprof.pipeline.recorded_problem import OtherTimes, collect_map_evidence
from gpuprof.pipeline.result import NoteCallback, NoteList, Result, say_nothing
from gpuprof.pipeline.router_capacity import describe_routers
from gpuprof.placement import feasibility
from gpuprof.placement.feasibility import Violation


@dataclass(frozen=True, kw_only=True)
class CheckResult(Result):
    """The rules broken by a map; a sound map breaks none."""

    label: str
    deployment: DeploymentMap
    violations: tuple[Violation, ...]

    @property
    def is_sound(self) -> bool:
        """Whether the map breaks no rule."""
        return not self.violations

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each broken rule: the rule, the place, and the fault."""
        return [asdict(violation) for violation in self.violations]

    def raise_if_broken(self) -> None:
        """Check that the map is sound.

        Raises
        ------
        InfeasibleError
            When the map breaks a rule.
        """
        if self.violations:
            count = len(self.violations)
            raise InfeasibleError(f"{self.label} breaks {count} {'rule' if count == 1 else 'rules'}")


def check(
    deployment: MapArgument = Path("map.json"),
    *,
    against: DemandsArgument | None = None,
    db: PathArgument | None = None,
    estimator: str | None = None,
    precision: str | None = None,
    runtime: str | None = None,
    device_file: PathArgument | None = None,
    allow_changed: bool = False,
    note: NoteCallback = say_nothing,
) -> CheckResult:
    """Check geometry, shares, memory, rates and SLOs of a map.

    Parameters
    ----------
    deployment : path or DeploymentMap
    against : path or sequence of Demand, optional
        Demands to check instead of the map's own.
    db : path, optional
        Kernel database; without a database the map's own times and memory are used, unless they were predicted from
        files alone and the files are still there.
    estimator, precision, runtime : str, optional
        Replacements for the map's own settings.
    device_file : path, optional
        TOML file with GPUs that the catalogue lacks.
    allow_changed : bool
        Accept models whose files changed since the map was planned.
    note : callable, optional
        Called with each remark immediately.

    Raises
    ------
    InputError
        When a file is invalid.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", Path(tempfile.mkdtemp()) / "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(20.0))
    >>> plan = gpuprof.place([demand], fleet="a100-40")
    >>> gpuprof.check(plan.deployment).is_sound
    True
    >>> stricter = [gpuprof.Demand("mlp", rate_rps=200.0, slo=gpuprof.Slo(0.001))]
    >>> [violation.rule for violation in gpuprof.check(plan.deployment, against=stricter).violations]
    ['slo']
    """
    notes = NoteList(note)
    demands = None if against is None else resolve_demands(against)
    resolved = resolve_map(deployment)
    other = OtherTimes(estimator, precision, runtime, device_file)
    evidence = collect_map_evidence(resolved, optional_path(db), demands, map_folder(deployment), notes.add, other)
    notes.add(*_describe_strangers(resolved))
    if evidence.estimator is None:
        name = estimator or resolved.planned_with.estimator
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
    for name, message in find_changed(locate_files(resolved, map_folder(deployment))):
        if allow_changed:
            notes.add(message)
        else:
            violations = (*violations, Violation("file", name, message))
    return CheckResult(notes=notes.all(), label=map_label(deployment), deployment=resolved, violations=violations)


def _describe_strangers(deployment: DeploymentMap) -> Iterator[str]:
    """Yield a note on a policy or an estimator of the map without a plug-in here: its claims cannot be checked."""
    from gpuprof.estimators.builtin import estimator_names
    from gpuprof.placement.policies import policy_names

    policy, estimator = deployment.policy, deployment.planned_with.estimator
    # A prefix match: policies append their options to their name.
    if not any(policy.startswith(name) for name in policy_names()) and ":" not in policy:
        yield f"the map names {policy!r} as its policy, which gpuprof does not have"
    if estimator not in estimator_names() and ":" not in estimator:
        yield f"the map names {estimator!r} as its estimator, which gpuprof does not have"
