"""Planning: a checked map from a problem and a policy."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from gpuprof.domain.deployment import DeploymentMap, read_creation_time
from gpuprof.domain.plural import count_of
from gpuprof.errors import InputError, UnstableError
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Problem, collect_evidence
from gpuprof.placement.search_space import refuse_oversized


def plan_map(problem: Problem, policy: Policy, created: str | None = None) -> DeploymentMap:
    """Return the policy's map after a feasibility check.

    Raises `InputError` when a demand is too large to be planned, or ``created`` is not a time; `UnstableError` when
    the map breaks a rule: the policy is faulty, and its map must not be deployed. ``created``: creation time of the
    map; by default that of ``SOURCE_DATE_EPOCH``, else none.
    """
    refuse_oversized(problem)
    created = created or _read_source_date()
    if created is not None:
        read_creation_time(created)
    deployment = to_map(problem, policy.place(problem), created)
    # The check covers every policy, plug-ins and our own alike. The rule on device time is excepted: it fails under an
    # estimator's premise (USHER's), which the user chose by name: `place` warns, and `check` refuses the map.
    broken = [fault for fault in check(deployment, collect_evidence(problem)) if fault.rule != "time"]
    if broken:
        rules = count_of(len(broken), "rule")
        raise UnstableError(
            f"the policy {deployment.policy} made a map that breaks {rules}, first: {broken[0]}",
            "choose another policy with --policy",
        )
    return deployment


def _read_source_date() -> str | None:
    """Return the time of the variable for reproducible builds; None where it is unset."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    try:
        return datetime.fromtimestamp(int(text), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        raise InputError(f"SOURCE_DATE_EPOCH must be seconds since 1970 but got {text!r}") from None
