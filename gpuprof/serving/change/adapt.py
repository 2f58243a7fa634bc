"""Adapts the map to the load: replans when the measured load leaves the plan's bounds.

Changing maps is expensive, and measurements are noisy. So a model must be out of bounds for several periods, longer for
excess than for lack of capacity. After a move, nothing is judged until the new workers have settled. Maps are planned
with headroom, so that the new bounds enclose the measured load. If no better map exists, planning is repeated only
after the load has changed, or after increasing intervals.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from gpuprof.domain.deployment import DeploymentMap, write_map
from gpuprof.domain.estimate import BEYOND_SEEN, INTERPOLATED, MEASURED
from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.serving.change.window import HEADROOM, Departure, ObservedLoad, ServiceWindow, find_departure, read_planned
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import (
    BatchTimes,
    ServedModel,
    count_batches,
    find_neighbour_slowdowns,
    sum_times,
)
from gpuprof.serving.watch.logs import LOGGER

_MOST_WAITED_PERIODS = 64
_NICENESS = 5  # on a CPU, planning shares the cores with the workers
#: Consecutive periods with too little (True), or too much (False) capacity before a change.
_PATIENCE = {True: 2, False: 6}


@dataclass(frozen=True, slots=True)
class Load:
    """The load for which a map is planned."""

    rates_rps: Mapping[str, float]  #: Measured rates of models out of bounds, planned rates of the others.
    #: By model: batch time relative to the estimate; models left out have the estimated time.
    slowdowns: Mapping[str, float]
    #: By model and a neighbour on its device: likewise, for batches run beside this neighbour alone.
    beside: Mapping[tuple[str, str], float] = field(default_factory=dict)


class Replanner(Protocol):
    """Plans a map for a load; picklable, since it is called in another process."""

    def __call__(self, deployment: DeploymentMap, load: Load) -> DeploymentMap | None:
        """Return a better map for ``load`` to which a server of ``deployment`` can switch; None if there is none."""


@dataclass(frozen=True, slots=True)
class AdaptSettings:
    """When maps are changed."""

    replan: Replanner
    output: Path  #: Path to which each new map is written.
    period_s: float = 5.0  #: Time over which the load is measured.


class Adapter:
    """Decides when another map is planned and applied.

    ``deployment``: the served map; ``apply``: moves the server to the map at a path.
    """

    def __init__(
        self,
        router: Router,
        deployment: DeploymentMap,
        settings: AdaptSettings,
        apply: Callable[[Path], Awaitable[dict[str, Any]]],
    ) -> None:
        self._deployment = deployment
        self._settings = settings
        self._apply = apply
        self._meter = LoadMeter(router)
        self._slowdowns: dict[str, float] = {}
        self._beside: dict[tuple[str, str], float] = {}
        self._streaks: Counter[tuple[str, bool]] = Counter()
        self._asked: Load | None = None
        self._waits = 1
        self._not_before = 0.0

    async def watch(self) -> None:
        """Measure and decide, period after period."""
        self._meter.take()
        while True:
            await asyncio.sleep(self._settings.period_s)
            loads = self._meter.take()
            try:
                await self.decide(loads)
            except GpuprofError as error:
                LOGGER.warning("cannot adapt the map", extra={"error": str(error)})
                self._back_off()

    def follow(self, deployment: DeploymentMap) -> None:
        """Compare the load with this map from now on, after it was applied."""
        self._deployment = deployment
        self._streaks.clear()

    async def decide(self, loads: Mapping[str, ObservedLoad]) -> None:
        """Compare a period's load with the plan, and apply another map if needed.

        Raises `GpuprofError` when planning or moving fails; the old map stays.
        """
        reasons = self._find_departures(loads)
        if not reasons:
            return
        load = self._make_load(loads, reasons)
        if time.monotonic() < self._not_before and self._is_same_as_last(load, reasons):
            return
        self._asked = load
        LOGGER.warning(
            "the load leaves the plan's bounds, the placer is asked", extra=self._describe_leaving(loads, reasons)
        )
        target = await plan_aside(self._settings.replan, self._deployment, load)
        if target is None:
            LOGGER.warning("no better map is found for this load, the map stays", extra={"models": sorted(reasons)})
            self._back_off()
            return
        await self._move(target, load)

    def _find_departures(self, loads: Mapping[str, ObservedLoad]) -> dict[str, Departure]:
        """Return the models out of bounds for long enough, and their departures."""
        departures = {}
        for model, observed in loads.items():
            if model not in self._deployment.models:
                continue
            reason = find_departure(read_planned(self._deployment, model), observed)
            for short in (True, False):
                is_repeated = reason is not None and reason.is_short is short
                self._streaks[model, short] = self._streaks[model, short] + 1 if is_repeated else 0
            if reason is not None and self._streaks[model, reason.is_short] >= _PATIENCE[reason.is_short]:
                departures[model] = reason
        return departures

    def _make_load(self, loads: Mapping[str, ObservedLoad], reasons: Mapping[str, Departure]) -> Load:
        """Return planned figures, replaced by measured figures for models out of bounds."""
        rates = {name: entry.rate_rps for name, entry in self._deployment.models.items()}
        slowdowns, beside = dict(self._slowdowns), dict(self._beside)
        for model, reason in reasons.items():
            observed = loads[model]
            measured = HEADROOM * observed.window.rate_rps
            # A model without requests keeps the smallest replica for later requests.
            rates[model] = max(measured, 0.01 * rates[model])
            if observed.slowdown is None or reason not in (Departure.LATENCY, Departure.QUICK, Departure.SLO):
                continue
            if not observed.beside or reason is Departure.QUICK or not self._is_measured(model):
                slowdowns[model] = slowdowns.get(model, 1.0) * observed.slowdown
                continue
            for neighbour, factor in observed.beside.items():
                beside[model, neighbour] = max(1.0, factor) * beside.get((model, neighbour), 1.0)
        return Load(rates, slowdowns, beside)

    def _is_measured(self, model: str) -> bool:
        """Return whether a model's times without neighbours were measured, so that only its neighbours can slow it."""
        sources = [replica.predicted.source for *_, replica in self._deployment.places() if replica.model == model]
        return bool(sources) and all(source.startswith((MEASURED, INTERPOLATED)) for source in sources)

    def _is_same_as_last(self, load: Load, reasons: Mapping[str, Departure]) -> bool:
        last = self._asked
        return last is not None and all(
            _is_equivalent(load.rates_rps[model], last.rates_rps.get(model, 0.0))
            and _is_equivalent(load.slowdowns.get(model, 1.0), last.slowdowns.get(model, 1.0))
            and all(_is_equivalent(factor, last.beside.get(pair, 1.0)) for pair, factor in load.beside.items())
            for model in reasons
        )

    def _describe_leaving(
        self, loads: Mapping[str, ObservedLoad], reasons: Mapping[str, Departure]
    ) -> dict[str, object]:
        models = {
            model: {
                "why": str(reason),
                "rate_rps": round(loads[model].window.rate_rps, 2),
                "planned_rps": round(self._deployment.models[model].rate_rps, 2),
                "slowdown": None if (ratio := loads[model].slowdown) is None else round(ratio, 3),
                "slowdown_beside": {peer: round(factor, 3) for peer, factor in loads[model].beside.items()},
                "p99_ms": None if (p99 := loads[model].window.percentile_ms(99.0)) is None else round(p99, 1),
                "slo_ms": self._deployment.models[model].slo_ms,
            }
            for model, reason in reasons.items()
        }
        return {"models": models}

    async def _move(self, target: DeploymentMap, load: Load) -> None:
        await asyncio.to_thread(write_map, target, self._settings.output)
        move = await self._apply(self._settings.output)
        self.follow(target)
        self._slowdowns, self._beside = dict(load.slowdowns), dict(load.beside)
        rates = {name: round(model.rate_rps, 2) for name, model in target.models.items()}
        log_fields = {
            "planned_rps": rates,
            "corrected_beside": {f"{model} beside {peer}": round(by, 3) for (model, peer), by in load.beside.items()},
            "beyond_what_was_seen": sorted(
                {replica.model for *_, replica in target.places() if BEYOND_SEEN in replica.predicted.source}
            ),
            "map": str(self._settings.output),
            **move,
        }
        LOGGER.warning("another map is served for the load", extra=log_fields)
        if move["started"] or move["stopped"]:
            self._waits = 1
        # This period is not judged: new workers are slower at first, and old workers still answer accepted requests.
        await asyncio.sleep(self._settings.period_s)
        self._meter.take()
        self._back_off()

    def _back_off(self) -> None:
        """Wait before planning for the same load again, longer each time."""
        self._not_before = time.monotonic() + self._waits * self._settings.period_s
        self._waits = min(2 * self._waits, _MOST_WAITED_PERIODS)


async def plan_aside(replan: Replanner, deployment: DeploymentMap, load: Load) -> DeploymentMap | None:
    """Return a map planned in a child process: planning takes seconds, while the event loop must answer requests.

    Raises the planner's `GpuprofError`, and `UnavailableError` for any other error or the death of the process.
    """
    # Spawned: a fork would have the router's sockets, and its threads' locks as they were.
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_plan, args=(sender, replan, deployment, load), daemon=True)
    try:
        process.start()
        sender.close()  # held here as well, the end of the process would go unnoticed
        target, error = await asyncio.to_thread(receiver.recv)
    except (EOFError, OSError):
        raise UnavailableError("the process that plans ended meanwhile") from None
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
    if error is not None:
        raise error
    plan: DeploymentMap | None = target
    return plan


def _plan(sender: Connection, replan: Replanner, deployment: DeploymentMap, load: Load) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the router drains first
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(_NICENESS)
    try:
        sender.send((replan(deployment, load), None))
    except GpuprofError as error:
        sender.send((None, error))
    except Exception as error:  # the router reports it
        sender.send((None, UnavailableError(f"{type(error).__name__}: {error}")))


def _is_equivalent(new: float, old: float) -> bool:
    return abs(new - old) <= (HEADROOM - 1.0) * old


class LoadMeter:
    """Measures the load between successive calls."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._at = time.monotonic()
        self._counted: dict[str, ServiceWindow] = {}
        self._batches: dict[str, BatchTimes] = {}

    def take(self) -> dict[str, ObservedLoad]:
        """Return the load of each model since the last call; new models are left out."""
        now = time.monotonic()
        seconds, self._at = max(1e-6, now - self._at), now
        models = self._router.list_models()
        before = self._counted
        self._counted = {model.name: ServiceWindow.of(model.list_statistics()) for model in models}
        slowdowns = {model.name: self._slowdown(model) for model in models}
        beside = find_neighbour_slowdowns(models, self._batches)
        replicas = [replica for model in models for replica in model.replicas]
        self._batches = {replica.plan.name: count_batches(replica) for replica in replicas}
        return {
            name: ObservedLoad(before[name].until(counts, seconds), slowdowns[name], beside.get(name, {}))
            for name, counts in self._counted.items()
            if name in before
        }

    def _slowdown(self, model: ServedModel) -> float | None:
        """Return the measured over the predicted time of a model's batches since the last call."""
        sums = [sum_times(replica, self._batches.get(replica.plan.name, {})) for replica in model.replicas]
        took_ns, predicted_ns = (sum(column) for column in zip(*sums, strict=True)) if sums else (0.0, 0.0)
        return took_ns / predicted_ns if predicted_ns > 0.0 else None
