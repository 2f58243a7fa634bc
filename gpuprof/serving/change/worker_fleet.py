"""The workers of a server: started for a plan, moved to another plan while serving continues, and ended."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import monotonic

from gpuprof.domain.deployment import DeploymentMap, PublicName
from gpuprof.errors import GpuprofError
from gpuprof.serving.engine import Engine
from gpuprof.serving.machine.orders import WorkerOrder
from gpuprof.serving.plan.serving_plan import PlannedReplica, Standby
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.router.served_replica import ReplicaPlan, ServedReplica
from gpuprof.serving.router.worker import SIMULATED_PROVIDER, ProcessWorker, ServedWorker, SimulatedWorker
from gpuprof.serving.watch.logs import LOGGER
from gpuprof.serving.watch.statistics import ModelStatistics

#: Before the number of the plan that a worker of several models was started for, in its name.
_GENERATION = "#"
#: By model and replica, the reason why it cannot start.
_Faults = dict[tuple[str, str], GpuprofError]


@dataclass(frozen=True, slots=True)
class PlanChange:
    """The effect of changing to another plan, by names of replicas."""

    kept: tuple[str, ...]
    started: tuple[str, ...]
    stopped: tuple[str, ...]
    failed: dict[str, str]  #: Replicas that could not start, and the reasons.


@dataclass(frozen=True, slots=True, eq=False)
class _RunningReplica:
    """A running replica and its model."""

    planned: PlannedReplica
    replica: ServedReplica
    model: ServedModel


class WorkerFleet:
    """Starts, keeps and ends workers.

    ``router``: gets the models when their workers are ready; ``engine``: provides the machines of the workers;
    ``hang_s``, ``drain_s``: as `ServerSettings`.
    """

    def __init__(self, router: Router, engine: Engine, hang_s: float, drain_s: float) -> None:
        self._router = router
        self._engine = engine
        self._hang_s = hang_s
        self._drain_s = drain_s
        self._running: list[_RunningReplica] = []
        self._moving = asyncio.Lock()
        # Loading takes a core: all at once, each model would load as long as all of them together.
        self._start_limit = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        self._standbys: dict[str, _RunningReplica] = {}
        self._claimed: dict[str, float] = {}
        self._generation = 0
        self.workers: list[ServedWorker] = []

    def count_processes(self) -> int:
        """Return the number of worker processes; models that take turns share one."""
        return len({worker.order.turns or number for number, worker in enumerate(self.workers)})

    def local_cores(self) -> frozenset[int]:
        """Return the cores of this machine with workers."""
        return frozenset(core for worker in self.workers if not worker.order.node for core in worker.order.cores)

    async def move(self, deployment: DeploymentMap, plan: Sequence[PlannedReplica]) -> PlanChange:
        """Serve ``plan`` from now on: common replicas stay, the others answer their accepted requests and end.

        Replicas that cannot start are left out: their model is served by its other replicas, or by those that run
        already, or not at all. Raises the first replica's `GpuprofError` when the plan has no other replicas; the
        running map is then unchanged.
        """
        async with self._moving:
            faults: _Faults = {(p.model, p.plan.name): p.fault for p in plan if p.fault is not None}
            unchanged, fresh, leaving = self._compare([planned for planned in plan if planned.fault is None])
            models = {name: self._model(deployment, name) for name in dict.fromkeys(planned.model for planned in plan)}
            fresh = self._make_names_unique(fresh, unchanged)
            # All workers, before the running map is touched: a failure up to here changes nothing.
            started = await self._start_replicas([(models[planned.model], planned) for planned in fresh], faults)
            if not unchanged and not started:
                raise next(iter(faults.values()))
            for name, model in models.items():
                model.slo_ms = deployment.models[name].slo_ms
                model.reserve.percentile = deployment.models[name].percentile
            for replica in started:
                replica.model.replicas.append(replica.replica)
            lost = models.keys() - {replica.planned.model for replica in (*unchanged, *started)}
            unchanged += [replica for replica in leaving if replica.planned.model in lost]
            leaving = [replica for replica in leaving if replica.planned.model not in lost]
            self._running = unchanged + started
            self._claimed.clear()  # standbys that took over are part of the plan now, or end
            await self._end_standbys()
            # This precedes the end of old replicas: no request may find its model without a replica.
            self._publish(deployment, faults)
            await asyncio.gather(*(self._retire(replica) for replica in leaving))
            await self._start_standbys()
            kept, begun, stopped = (
                tuple(replica.planned.plan.name for replica in group) for group in (unchanged, started, leaving)
            )
            return PlanChange(kept, begun, stopped, {replica: str(fault) for (_, replica), fault in faults.items()})

    def _publish(self, deployment: DeploymentMap, faults: _Faults) -> None:
        """Give the router the models with a replica, and the reasons why the others have none."""
        models = list(dict.fromkeys(replica.model for replica in self._running))
        for model in models:
            specs = [spec for r in self._running if r.model is model for spec in r.replica.specs]
            model.spec = max(specs, key=lambda spec: spec.max_batch)
        reasons = {}
        for (name, replica), fault in faults.items():
            served = any(model.name == name for model in models)
            event = "replica cannot start, others serve its model" if served else "model is not served"
            LOGGER.warning(event, extra={"model": name, "replica": replica, "error": str(fault)})
            entry = deployment.models[name]
            for client, request in (entry.members or {name: entry}).items():
                reasons[PublicName.of(client, request.path)] = str(fault)
        members = {replica.planned.model: replica.planned.members for replica in self._running}
        self._router.publish(models, members, reasons)

    def standby(self, replica: str) -> ReplicaPlan | None:
        """Return the plan of a replica's standby, None without a standby."""
        standby = self._standbys.get(replica)
        return None if standby is None else standby.planned.plan

    async def take_over(self, replica: str) -> ReplicaPlan | None:
        """Let a replica's standby take over while the replica drains; return its plan, None if the standby has gone."""
        async with self._moving:
            ready = self._standbys.get(replica)
            if ready is None or not ready.replica.is_alive:
                return None
            old = next(r for r in self._running if r.planned.plan.name == replica)
            del self._standbys[replica]
            ready.model.replicas.append(ready.replica)
            self._running[self._running.index(old)] = ready
            assert old.planned.standby is not None
            for claim in old.planned.standby.claims:
                self._claimed[claim.resource] = self._claimed.get(claim.resource, 0.0) + claim.amount
            await asyncio.gather(self._retire(old), self._end_standbys())
            return ready.planned.plan

    async def stop(self) -> None:
        """End every worker."""
        await self._dismiss(list(self.workers))

    def _compare(
        self, plan: Sequence[PlannedReplica]
    ) -> tuple[list[_RunningReplica], list[PlannedReplica], list[_RunningReplica]]:
        """Return the replicas to keep, to start and to retire."""
        leaving = list(self._running)
        unchanged, fresh = [], []
        for planned in plan:
            match = next((replica for replica in leaving if _identity(replica.planned) == _identity(planned)), None)
            if match is None:
                fresh.append(planned)
            else:
                leaving.remove(match)
                unchanged.append(replace(match, planned=replace(match.planned, standby=planned.standby)))
        return unchanged, fresh, leaving

    def _make_names_unique(
        self, fresh: Sequence[PlannedReplica], unchanged: Sequence[_RunningReplica]
    ) -> list[PlannedReplica]:
        """Give new replicas and their groups names that are unique in this server."""
        names = {replica.planned.plan.name for replica in self._running}
        self._generation += 1
        replicas = []
        for planned in fresh:
            name = planned.plan.name
            number = 0
            while name in names:
                name, number = f"{planned.model}/{number}", number + 1
            names.add(name)
            group, turns = planned.orders[0].group.removesuffix(planned.plan.name) + name, planned.orders[0].turns
            if turns:  # the models of a worker have a group in common, which an ending worker may have had
                group = turns = f"{turns}{_GENERATION}{self._generation}"
            orders = tuple(replace(order, group=group, turns=turns) for order in planned.orders)
            replicas.append(replace(planned, plan=replace(planned.plan, name=name), orders=orders))
        return replicas

    async def _start_standbys(self) -> None:
        """Start the missing standbys of replicas."""
        replicas = [replica for replica in self._running if replica.planned.plan.name not in self._standbys]
        await asyncio.gather(
            *(self._start_standby(s, s.planned.standby) for s in replicas if s.planned.standby is not None)
        )

    async def _start_standby(self, running: _RunningReplica, standby_plan: Standby) -> None:
        """Start the standby of a replica; a standby that cannot start is left out."""
        planned, name = running.planned, running.planned.plan.name
        group = f"{planned.orders[0].group}-shadow"
        plan = replace(standby_plan.plan, name=f"{name}-shadow")
        orders = tuple(replace(order, group=group) for order in standby_plan.orders)
        standby = replace(planned, plan=plan, orders=orders, standby=None)
        faults: _Faults = {}
        for started in await self._start_replicas([(running.model, standby)], faults):
            self._standbys[name] = started
        for fault in faults.values():
            LOGGER.warning("replica has no standby", extra={"replica": name, "error": fault.message})

    async def _end_standbys(self) -> None:
        """End standbys that no replica needs, or whose resources are no longer free."""
        standby_plans = {replica.planned.plan.name: replica.planned.standby for replica in self._running}
        for name, standby in list(self._standbys.items()):
            plan = standby_plans.get(name)
            if plan is not None and _orders(plan.orders) == _orders(standby.planned.orders) and self._fits(plan):
                continue
            del self._standbys[name]
            await self._dismiss(standby.replica.workers)
            LOGGER.info("standby ended", extra={"replica": name})

    def _fits(self, standby: Standby) -> bool:
        """Return whether a standby's resources are free, despite standbys that took over."""
        amounts = [(self._claimed.get(claim.resource, 0.0) + claim.amount, claim.spare) for claim in standby.claims]
        return all(amount <= spare or math.isclose(amount, spare) for amount, spare in amounts)

    def _model(self, deployment: DeploymentMap, name: str) -> ServedModel:
        entry = deployment.models[name]
        public = PublicName.of(name, entry.path)
        model = self._router.find_by_map_name(name)
        if model is not None and model.public == public:
            return model
        return ServedModel(name, entry.slo_ms, self._router.arena, entry.percentile, public)

    async def _start_replicas(
        self, planned: Sequence[tuple[ServedModel, PlannedReplica]], faults: _Faults
    ) -> list[_RunningReplica]:
        """Return the replicas that started, once all are ready or failed; add reasons of failures to ``faults``."""

        async def start(model: ServedModel, replica: PlannedReplica) -> list[_RunningReplica]:
            try:
                return [await self._start_replica(model, replica)]
            except GpuprofError as error:
                faults[replica.model, replica.plan.name] = error
                return []

        return [replica for group in await asyncio.gather(*(start(*pair) for pair in planned)) for replica in group]

    async def _start_replica(self, model: ServedModel, planned: PlannedReplica) -> _RunningReplica:
        """Start the workers of a replica; when one fails or the wait is cancelled, end them all.

        Raises `GpuprofError` when a worker cannot load the model or have its share.
        """
        workers = [
            await self._make_worker(f"{planned.plan.name}.{number}", order)
            for number, order in enumerate(planned.orders)
        ]
        self.workers += workers
        running = _RunningReplica(planned, ServedReplica(planned.plan, workers, model, ModelStatistics()), model)

        async def start(worker: ServedWorker) -> None:
            # A worker of several models starts with all of them, and loads one after another.
            async with nullcontext() if worker.order.turns else self._start_limit:
                await worker.start()

        tasks = [asyncio.ensure_future(start(worker)) for worker in workers]
        try:
            await asyncio.gather(*tasks)
        except BaseException:  # also when cancelled: the workers begun so far must end
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._dismiss(workers)
            raise
        return running

    async def _retire(self, running: _RunningReplica) -> None:
        """Stop sending requests to a replica, reassign or answer its requests, and end its workers."""
        replica = running.replica
        running.model.retire_replica(replica)
        deadline = monotonic() + self._drain_s
        while replica.in_flight and monotonic() < deadline:
            await asyncio.sleep(0.01)
        running.model.forget_replica(replica)
        await self._dismiss(replica.workers)
        LOGGER.info("replica retired", extra={"replica": replica.plan.name})

    async def _dismiss(self, workers: Sequence[ServedWorker]) -> None:
        await asyncio.gather(*(worker.stop() for worker in workers))
        self.workers = [worker for worker in self.workers if worker not in workers]

    async def _make_worker(self, name: str, order: WorkerOrder) -> ServedWorker:
        if order.provider == SIMULATED_PROVIDER:
            return SimulatedWorker(name, order, self._hang_s)
        machine = await self._engine.machine(order.node)
        return ProcessWorker(name, order, self._hang_s, machine, self._router.arena)


def _identity(planned: PlannedReplica) -> tuple[object, ...]:
    """Return the identity of a replica: all its properties but its name and its planned rate."""
    return planned.model, replace(planned.plan, name="", rate_rps=0.0), _orders(planned.orders)


def _orders(orders: Sequence[WorkerOrder]) -> tuple[WorkerOrder, ...]:
    """Return worker orders without group names and without the plan for which the worker was started."""
    return tuple(replace(order, group="", turns=order.turns.partition(_GENERATION)[0]) for order in orders)
