"""Replaces replicas of several models in a map by one replica of their merged model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuprof.domain.deployment import (
    DeploymentMap,
    MapPrediction,
    Merge,
    MergedRate,
    ModelPrediction,
    Partition,
    Replica,
    ReplicaPrediction,
    share_of,
)
from gpuprof.domain.estimate import Workload
from gpuprof.domain.model_queues import ModelQueues
from gpuprof.domain.planned_server import make_planned_server
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, Sojourn
from gpuprof.errors import InputError
from gpuprof.placement.objective import measure
from gpuprof.placement.predict import Stream, batch_figures, is_memory_known, percentile_over
from gpuprof.placement.problem import MEANS, Problem
from gpuprof.placement.segment import Segments
from gpuprof.rules.host_work import disturb_at_worst
from gpuprof.rules.merged_estimate import MergedEstimator, MergedWork


@dataclass(frozen=True, slots=True)
class PartitionIndex:
    """A partition of a map: positions of its node, its device and itself."""

    node: int
    gpu: int
    partition: int


@dataclass(frozen=True, slots=True)
class MergeOffer:
    """A merged file that could replace several replicas."""

    name: str  #: Name of the merge in the map.
    merge: Merge
    file: Path  #: Present path of the file.


def shared_spots(deployment: DeploymentMap) -> Iterator[tuple[PartitionIndex, tuple[str, ...]]]:
    """Yield every partition with unmerged replicas of several models, and the models.

    Partitions with replicas taking turns are skipped: only one of their batches runs at a time already.
    """
    for n, node in enumerate(deployment.nodes):
        for g, gpu in enumerate(node.gpus):
            for p, partition in enumerate(gpu.partitions):
                models = tuple(dict.fromkeys(r.model for r in partition.replicas if not r.merged))
                if len(models) > 1 and not any(r.turns for r in partition.replicas):
                    yield PartitionIndex(n, g, p), models


class MapMerger:
    """Replaces replicas by merged replicas, one after another, wherever the SLOs allow it.

    ``problem``: the map's problem.
    """

    def __init__(self, problem: Problem, deployment: DeploymentMap) -> None:
        self.deployment = deployment
        self._problem = problem
        self._works: dict[str, MergedWork] = {}

    @property
    def problem(self) -> Problem:
        """The problem with an estimator of the merges made so far, for checking the map."""
        return replace(self._problem, estimator=MergedEstimator(self._problem.estimator, self._works))

    def accept(self, spot: PartitionIndex, offer: MergeOffer) -> str | None:
        """Merge the replicas of an offer at a partition; return None, or the reason against it without a change.

        The merged replica has the shares of the replaced replicas and one queue for all their requests. Its largest
        batch is the batch with most requests in time.
        """
        partition = self._partition(spot)
        chosen = _choose_replicas(partition, offer)
        others = [replica for replica in partition.replicas if not any(replica is one for one in chosen)]
        rates = {replica.model: replica.rate_rps for replica in chosen}
        before = dict(self._works)
        self._works[offer.name] = MergedWork(rates, offer.merge.saved_weight_bytes, offer.file)
        try:
            merged_replica = self._best(spot, offer.name, chosen, others)
        except InputError as error:
            merged_replica = error.message
        if isinstance(merged_replica, str):
            self._works = before
            return merged_replica
        self.deployment = self._with(spot, offer, (*others, merged_replica))
        return None

    def _partition(self, spot: PartitionIndex) -> Partition:
        return self.deployment.nodes[spot.node].gpus[spot.gpu].partitions[spot.partition]

    def _best(
        self, spot: PartitionIndex, name: str, chosen: Sequence[Replica], others: Sequence[Replica]
    ) -> Replica | str:
        """Return the merged replica with most requests in time, or the reason why no batch keeps the SLOs."""
        feasible: list[Replica] = []
        reasons: list[str] = []
        # A call has room for a request of each model, and for the largest batch of any of the replicas.
        least, most = max(len(chosen), *(r.batch for r in chosen)), sum(replica.batch for replica in chosen)
        doubled = (least * 2**power for power in range(most.bit_length()))
        for batch in sorted({least, most, *(batch for batch in doubled if batch < most)}):
            made = self._replica(spot, Workload(name, batch, *_part(self._partition(spot), chosen)), chosen, others)
            (reasons if isinstance(made, str) else feasible).append(made)  # type: ignore[arg-type]
        if not feasible:
            return reasons[-1]
        return max(feasible, key=lambda one: (one.predicted.goodput_rps, -(one.predicted.p99_ms or 0.0), -one.batch))

    def _replica(
        self, spot: PartitionIndex, workload: Workload, chosen: Sequence[Replica], others: Sequence[Replica]
    ) -> Replica | str:
        """Return the merged replica with this batch size, or its broken SLO."""
        problem, partition = self.problem, self._partition(spot)
        device = problem.device(self.deployment.nodes[spot.node].gpus[spot.gpu].device)
        beside = [Workload(r.model, r.batch, share_of(partition, r), r.processes) for r in others]
        # SLOs are kept at the planning confidence; the map states means, as `Predictor` does.
        careful = Segments(problem).server(device, workload, beside)
        if broken := self._find_broken_slo(careful, chosen, Segments(problem).throughput_rps(device, workload, beside)):
            return broken
        means = Segments(replace(problem, options=replace(problem.options, confidence=MEANS)))
        server, estimate = means.server(device, workload, beside), means.estimate(device, workload, beside)
        undisturbed = means.undisturbed_server(device, workload, beside)
        memory = None if estimate.memory_bytes is None else int(estimate.memory_bytes.value) * workload.processes
        rate = sum(replica.rate_rps for replica in chosen)
        prediction = ReplicaPrediction(
            **batch_figures(estimate) | {"latency_ms_interval": None, "throughput_rps_interval": None},
            goodput_rps=rate,
            utilization=rate / estimate.throughput_rps.value,
            memory_bytes=memory,
        )
        merged = Replica(
            model=workload.model,
            batch=workload.batch,
            processes=workload.processes,
            sm_share_pct=workload.share.sm_pct,
            memory_limit_bytes=memory if is_memory_known(estimate) else None,
            rate_rps=rate,
            batch_latency_ms=None if problem.options.latency_budget is not None else undisturbed.latency_ms,
            predicted=prediction,
            merged=tuple(MergedRate(model=r.model, rate_rps=r.rate_rps, goodput_rps=r.rate_rps) for r in chosen),
        )
        return merged if problem.options.latency_budget is not None else self._with_queueing(merged, server)

    def _find_broken_slo(self, server: BatchServer, chosen: Sequence[Replica], most_rps: float) -> str:
        """Return the objective the server would break, empty where it keeps all."""
        if isinstance(self._problem.queueing, ModelQueues):
            return "of how requests of several models arrive together the trace says nothing"
        options, rate = self._problem.options, sum(replica.rate_rps for replica in chosen)
        if rate >= most_rps or (options.latency_budget is None and rate >= server.capacity_rps):
            return f"one replica for all would serve at most {most_rps:.4g} of {rate:.4g} requests/s"
        law = None if options.latency_budget else self._law(rate, server)
        for replica in chosen:
            slo = self._problem.demand(replica.model).slo
            if law is None:
                took, allowed, name = server.latency_ms[-1], (options.latency_budget or 1.0) * slo.latency_ms, "a batch"
            else:
                took, allowed, name = law.percentile(slo.percentile), slo.latency_ms, f"p{slo.percentile:g}"
            if not took <= allowed:
                return f"{name} of the merged replica would be {took:.4g} ms, {replica.model} allows {allowed:.4g} ms"
        return ""

    def _law(self, rate_rps: float, server: BatchServer) -> Sojourn:
        return self._problem.queueing.sojourn(Arrivals(rate_rps), server)

    def _with_queueing(self, replica: Replica, server: BatchServer) -> Replica:
        law = self._law(replica.rate_rps, server)
        merged = tuple(
            one.model_copy(update={"goodput_rps": one.rate_rps * law.fraction_within(self._slo_ms(one.model))})
            for one in replica.merged
        )
        said = {f"p{percent}_ms": law.percentile(percent) for percent in (50, 95, 99)}
        said |= {"goodput_rps": sum(one.goodput_rps for one in merged), "utilization": law.utilization}
        prediction = replica.predicted.model_copy(update=said)
        return replica.model_copy(update={"merged": merged, "predicted": prediction})

    def _slo_ms(self, model: str) -> float:
        return self._problem.demand(model).slo.latency_ms

    def _with(self, spot: PartitionIndex, offer: MergeOffer, replicas: Sequence[Replica]) -> DeploymentMap:
        """Return the map with these replicas in the partition, and its predictions recomputed."""
        nodes = list(self.deployment.nodes)
        gpus = list(nodes[spot.node].gpus)
        partitions = list(gpus[spot.gpu].partitions)
        partitions[spot.partition] = partitions[spot.partition].model_copy(update={"replicas": tuple(replicas)})
        gpus[spot.gpu] = gpus[spot.gpu].model_copy(update={"partitions": tuple(partitions)})
        nodes[spot.node] = nodes[spot.node].model_copy(update={"gpus": tuple(gpus)})
        merges = self.deployment.merges | {offer.name: offer.merge}
        drawn = self.deployment.model_copy(update={"nodes": tuple(nodes), "merges": merges})
        models = {
            name: model.model_copy(update={"predicted": self._model(drawn, name)})
            if name in offer.merge.members
            else model
            for name, model in drawn.models.items()
        }
        return drawn.model_copy(update={"models": models, "predicted": self._figures(drawn)})

    def _figures(self, drawn: DeploymentMap) -> MapPrediction:
        figures = measure(drawn, {entry.device.name: entry.device for entry in self._problem.fleet.entries})
        return drawn.predicted.model_copy(
            update={"goodput_rps": figures.goodput_rps, "internal_slack": figures.internal_slack}
        )

    def _model(self, drawn: DeploymentMap, name: str) -> ModelPrediction:
        serving = [replica for *_, replica in drawn.places() if name in replica.rates()]
        streams = [
            Stream(replica.rates()[name], self._law(replica.rate_rps, self._make_server(replica)))
            for replica in serving
            if replica.batch_latency_ms is not None
        ]
        return ModelPrediction(
            goodput_rps=sum(replica.goodputs()[name] for replica in serving),
            p50_ms=percentile_over(streams, 50.0),
            p95_ms=percentile_over(streams, 95.0),
            p99_ms=percentile_over(streams, 99.0),
        )

    def _make_server(self, replica: Replica) -> BatchServer:
        undisturbed = make_planned_server(replica, self._problem.options.overhead_ms)
        all_rps = sum(demand.rate_rps for demand in self._problem.demands)
        return disturb_at_worst(self._problem.options.host, undisturbed, all_rps)


def _choose_replicas(partition: Partition, offer: MergeOffer) -> list[Replica]:
    replicas: dict[str, Replica] = {}
    for replica in partition.replicas:
        if replica.model in offer.merge.members and not replica.merged:
            replicas.setdefault(replica.model, replica)
    return list(replicas.values())


def _part(partition: Partition, chosen: Sequence[Replica]) -> tuple[Share, int]:
    """Return the total share of the replicas, and their largest number of processes."""
    mig = None if partition.mig is None else partition.mig.profile
    total = min(100.0, sum(replica.sm_share_pct for replica in chosen))
    return Share(total, mig), max(replica.processes for replica in chosen)
