"""Monitors the models' SLOs, and activates the standbys of replicas that miss them.

iGniter (section 4.2) checks p99 every second; when it exceeds the SLO, iGniter checks again for half a second, and
then the process with the larger share takes over. Here the model's replica with the most late answers is replaced;
this replica answers its accepted requests, so that no request is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuprof.serving.change.window import ServiceWindow
from gpuprof.serving.change.worker_fleet import WorkerFleet
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.router.served_replica import ServedReplica
from gpuprof.serving.watch.logs import LOGGER
from gpuprof.serving.watch.statistics import ModelStatistics

#: Seconds between checks of p99; the second check, before a standby takes over, lasts half of it: iGniter's values.
PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Counts at a moment."""

    at: float
    models: Mapping[str, ServiceWindow]
    replicas: Mapping[str, ServiceWindow]


class StandbyController:
    """Decides when a standby takes over. ``worker_fleet``: holds the standbys."""

    def __init__(self, router: Router, worker_fleet: WorkerFleet) -> None:
        self._router = router
        self._worker_fleet = worker_fleet
        self._without: set[str] = set()

    async def watch(self) -> None:
        """Check the models period after period."""
        while True:
            await self.check_period()

    async def check_period(self) -> None:
        """Check the models for a period, suspects for longer, and activate standbys."""
        start = self._take_snapshot()
        await asyncio.sleep(PERIOD_S)
        models = [model for model in self._router.list_models() if self._is_breaking_slo(model, start)]
        if not models:
            return
        middle = self._take_snapshot()
        await asyncio.sleep(PERIOD_S / 2)
        for model in models:
            if model in self._router.list_models() and self._is_breaking_slo(model, middle):
                await self._take_over(model, start)
            else:
                LOGGER.info("p99 passed the SLO, and no longer does", extra={"model": model.name})

    def _is_breaking_slo(self, model: ServedModel, before: _Snapshot) -> bool:
        counts = _window_since(before.models, model.name, model.list_statistics(), before.at)
        return counts is not None and counts.breaks_slo(model.reserve.percentile)

    async def _take_over(self, model: ServedModel, start: _Snapshot) -> None:
        counts = _window_since(start.models, model.name, model.list_statistics(), start.at)
        assert counts is not None
        p99_ms = counts.percentile_ms(model.reserve.percentile)
        p99_ms = None if p99_ms is None else round(p99_ms, 1)
        log_fields = {"model": model.name, "p99_ms": p99_ms, "slo_ms": model.slo_ms, "answered": counts.answered,
                      "late": counts.late, "refused": counts.refused}  # fmt: skip
        replica = self._find_latest_replica(model, start)
        if replica is None:
            if model.name not in self._without:
                LOGGER.warning("p99 passes the SLO, and no standby is left", extra=log_fields)
            self._without.add(model.name)
            return
        self._without.discard(model.name)
        plan = await self._worker_fleet.take_over(replica.plan.name)
        if plan is not None:
            shares = {"share_pct": round(replica.plan.share_pct, 3), "new_share_pct": round(plan.share_pct, 3)}
            LOGGER.warning(
                "p99 passes the SLO, standby takes over",
                extra={**log_fields, "replica": replica.plan.name, "standby": plan.name, **shares},
            )

    def _find_latest_replica(self, model: ServedModel, start: _Snapshot) -> ServedReplica | None:
        """Return the replica with a standby and the most late answers; among equals, the busiest."""
        able = [replica for replica in model.replicas if self._worker_fleet.standby(replica.plan.name) is not None]

        def rate_lateness(replica: ServedReplica) -> tuple[float, int]:
            counts = _window_since(start.replicas, replica.plan.name, [replica.statistics], start.at)
            late_part = 0.0 if counts is None or not counts.answered else counts.late / counts.answered
            return late_part, replica.in_flight

        return max(able, key=rate_lateness, default=None)

    def _take_snapshot(self) -> _Snapshot:
        models = self._router.list_models()
        return _Snapshot(
            time.monotonic(),
            {model.name: ServiceWindow.of(model.list_statistics()) for model in models},
            {r.plan.name: ServiceWindow.of([r.statistics]) for model in models for r in model.replicas},
        )


def _window_since(
    before: Mapping[str, ServiceWindow], name: str, after: Iterable[ModelStatistics], at: float
) -> ServiceWindow | None:
    """Return the window since a snapshot; None for a model or replica missing from the snapshot."""
    earlier = before.get(name)
    return None if earlier is None else earlier.until(ServiceWindow.of(after), time.monotonic() - at)
