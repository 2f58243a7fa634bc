"""Runs policies on one problem and measures their maps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.errors import GpuprofError
from gpuprof.placement.deploy import Objective, measure, to_map
from gpuprof.placement.feasibility import Evidence, Violation, check
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Problem, collect_evidence


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a policy on a problem."""

    name: str  #: Name in the comparison: of the policy, or of the kind of device.
    #: None when the policy cannot work on the problem; ``reason`` then gives the cause.
    deployment: DeploymentMap | None
    objective: Objective | None
    violations: tuple[Violation, ...]  #: Rules its map breaks; a map with any must not be deployed.
    seconds: float  #: Wall-clock time of the decision.
    reason: str = ""

    @property
    def missing_rps(self) -> float:
        """Unserved requests per second."""
        return 0.0 if self.deployment is None else sum(shortfall.rate_rps for shortfall in self.deployment.unplaced)


def compare(problem: Problem, policies: Sequence[tuple[str, Policy]]) -> tuple[Outcome, ...]:
    """Run each (name, policy) on ``problem`` and return the outcomes in the same order."""
    evidence = collect_evidence(problem)
    return tuple(_outcome(problem, name, policy, evidence) for name, policy in policies)


def _outcome(problem: Problem, name: str, policy: Policy, evidence: Evidence) -> Outcome:
    started = time.perf_counter()
    try:
        placement = policy.place(problem)
        seconds = time.perf_counter() - started
        deployment = to_map(problem, placement)
    except GpuprofError as error:
        return Outcome(name, None, None, (), time.perf_counter() - started, str(error))
    except Exception as error:  # a faulty policy becomes a row of the table, so that the others' results are not lost
        reason = f"the policy failed: {type(error).__name__}: {error}"
        return Outcome(name, None, None, (), time.perf_counter() - started, reason)
    violations = check(deployment, evidence)
    return Outcome(name, deployment, measure(deployment, evidence.devices), violations, seconds)
