"""Shadow processes: standbys of replicas with a larger share, against errors of prediction (iGniter, section 4.2).

A standby has its model loaded and computes nothing until it takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuprof.rules.cpu_slices import CpuSlice, unassigned_cores
from gpuprof.rules.turns import held_shares
from gpuprof.serving.machine.orders import WorkerOrder
from gpuprof.serving.router.served_replica import ReplicaPlan
from gpuprof.serving.router.simulated_worker import SIMULATED_PROVIDER

#: Additional percent of the device for a standby, as far as available: iGniter's largest error.
SHADOW_PCT = 10.0
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Claim:
    """The resources that a standby takes when it is activated: a core, or a percentage of a GPU or MIG instance."""

    resource: str
    #: ``amount``, ``spare``: Amount that the standby takes, and amount that the plan leaves unused.
    amount: float
    spare: float


@dataclass(frozen=True, slots=True)
class Standby:
    """Standby workers of a replica."""

    plan: ReplicaPlan
    orders: tuple[WorkerOrder, ...]
    claims: tuple[Claim, ...]


class SpareResources:
    """The resources of each device and MIG instance outside a plan.

    ``placed``: place, MIG instance, share in percent and number of turns of every replica; ``cores``: of this
    machine.
    """

    def __init__(self, placed: Sequence[tuple[str, str, float, int]], cores: Sequence[int]) -> None:
        self._cores = cores
        shares: dict[tuple[str, str], list[tuple[float, int]]] = {}
        for place, mig, share, turns in placed:
            shares.setdefault((place, mig), []).append((share, turns))
        self._shares = {where: held_shares(turn_shares) for where, turn_shares in shares.items()}

    def standby(self, plan: ReplicaPlan, order: WorkerOrder, processes: int, extra_pct: float) -> Standby | None:
        """Return a standby with ``extra_pct`` more of the device, or with all that is left; None if too little is."""
        shares = self._shares[plan.place, plan.mig]
        left_pct = 100.0 - sum(shares)
        extra_pct = min(extra_pct, left_pct)
        if extra_pct < _EPSILON:
            return None
        larger = replace(plan, name=f"{plan.name}-shadow", share_pct=plan.share_pct + extra_pct)
        if order.gpu is not None and order.gpu.active_pct is not None:
            gpu = replace(order.gpu, active_pct=order.gpu.active_pct + extra_pct / processes)
            claims: tuple[Claim, ...] = (Claim(gpu.uuid, extra_pct, left_pct),)
            order = replace(order, gpu=gpu)
        elif order.provider == SIMULATED_PROVIDER:
            faster = tuple(ms * plan.share_pct / larger.share_pct for ms in order.latency_ms)
            claims = (Claim(f"{plan.place}/{plan.mig}", extra_pct, left_pct),)
            order = replace(order, latency_ms=faster)
            larger = replace(larger, latency_ms=faster)
        else:
            order, claims = self._on_more_cores(order, extra_pct, shares)
        return Standby(larger, (order,) * processes, claims)

    def _on_more_cores(
        self, order: WorkerOrder, extra_pct: float, shares: Sequence[float]
    ) -> tuple[WorkerOrder, tuple[Claim, ...]]:
        """Return the order of a worker with more of the CPU, preferably on cores that it runs on already."""
        spare = unassigned_cores(shares, self._cores)
        extra = extra_pct * len(self._cores) / 100.0
        claims: list[Claim] = []
        part = CpuSlice(order.cores, order.quota_cores)
        for core in sorted(spare, key=lambda core: (core not in order.cores, -spare[core])):
            amount = min(extra - sum(claim.amount for claim in claims), spare[core])
            if amount > _EPSILON:
                claims.append(Claim(f"{order.node} core {core}".lstrip(), amount, spare[core]))
                part = CpuSlice(tuple(sorted({*part.cores, core})), part.amount_cores + amount)
        if len(part.cores) - part.amount_cores < _EPSILON:
            part = CpuSlice(part.cores)
        quota = None if part.quota_cores is None else round(part.quota_cores, 6)
        return replace(order, cores=part.cores, quota_cores=quota, threads=part.threads), tuple(claims)
