"""Results of a simulation: goodput, percentiles, stages, misses by cause, utilisation; as rows and as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from gpuprof.domain.arrival_process import NS_PER_S
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.simulator.cluster import PlacedInstance, SimulationOptions
from gpuprof.simulator.state import CAUSES, COARSE_BITS, FINE_BITS, STAGES, WINDOWS, Tally, cdf_ms, percentile_ms

SCHEMA = "gpuprof.simulation/1"
_CDF_POINTS = 400


@dataclass(frozen=True, slots=True)
class ModelOutcome:
    """Results of a model, from its clients' view."""

    model: str
    slo_ms: float
    percentile: float
    #: ``requests``, ``answered``, ``in_time``: Arrivals; answered requests; requests answered within the SLO.
    requests: int
    answered: int
    in_time: int
    #: ``rate_rps``, ``goodput_rps``: Requests per second; requests answered within the SLO per second.
    rate_rps: float
    goodput_rps: float
    in_time_pct: float | None  #: Percentage of requests within the SLO; None without requests.
    slo_met: bool | None  #: Whether ``in_time_pct`` is at least the demanded percentile.
    #: ``mean_ms``, ``p50_ms``, ``p95_ms``, ``p99_ms``, ``max_ms``: Latency of the answered requests.
    mean_ms: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    #: ``stage_mean_ms``, ``stage_p99_ms``: By stage: network, batching (waiting for the batch to fill while a
    #: process is free), queue (waiting for a process), service.
    stage_mean_ms: Mapping[str, float | None]
    stage_p99_ms: Mapping[str, float | None]
    #: Requests outside the SLO by cause: the stage that delayed them, ``refused`` (hopeless), ``full`` (more requests
    #: in the system than the bound on memory) or ``failed`` (lost with a device, or no live replica).
    missed: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ReplicaOutcome:
    """Results of a replica.

    ``answered`` includes answers after the end of arrivals, ``throughput_rps`` does not; ``utilization`` is the mean
    fraction of time in which its processes were busy.
    """

    place: str
    model: str
    batch: int
    processes: int
    answered: int
    throughput_rps: float
    goodput_rps: float
    utilization: float
    mean_batch: float | None
    p50_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """Results of a model over time, and its distribution of latency."""

    model: str
    #: ``arrived``, ``answered``, ``in_time``: Numbers of requests by time of arrival.
    arrived: tuple[int, ...]
    answered: tuple[int, ...]
    in_time: tuple[int, ...]
    stage_mean_ms: Mapping[str, tuple[float | None, ...]]
    #: ``latency_ms``, ``fraction``: Cumulative distribution of the latency.
    latency_ms: tuple[float, ...]
    fraction: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EpochOutcome:
    """A map in force from ``begin_s`` to ``end_s``: its devices, its cost, and the replicas started for it."""

    begin_s: float
    end_s: float
    gpus: int
    cost_per_hour: float | None
    started: int


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """All results; ``times_s`` holds the starts of the windows of the time line and the end of the last.

    ``epochs`` lists the successive maps if the map was rescheduled; ``chains`` the results of chains of models, from
    the arrival at the first step to the answer of the last.
    """

    duration_s: float
    warmup_s: float
    seed: int
    models: tuple[ModelOutcome, ...]
    replicas: tuple[ReplicaOutcome, ...]
    times_s: tuple[float, ...]
    series: tuple[Series, ...]
    epochs: tuple[EpochOutcome, ...] = ()
    chains: tuple[ModelOutcome, ...] = ()
    steps: tuple[str, ...] = ()  #: Models of chains.

    @property
    def clients(self) -> tuple[ModelOutcome, ...]:
        """The results that clients see: those of chains in place of their steps."""
        return (*(model for model in self.models if model.model not in self.steps), *self.chains)

    @property
    def requests(self) -> int:
        """Number of requests counted."""
        return sum(model.requests for model in self.clients)

    @property
    def goodput_rps(self) -> float:
        """Requests per second answered within their SLO, of all models."""
        return sum(model.goodput_rps for model in self.clients)

    def document(self) -> dict[str, object]:
        """Return everything as plain values for JSON."""
        return {"schema": SCHEMA, "requests": self.requests, "goodput_rps": self.goodput_rps, **asdict(self)}


def outcome_of(
    deployment: DeploymentMap, places: Sequence[PlacedInstance], tally: Tally, options: SimulationOptions
) -> SimulationOutcome:
    """Return the outcome from a tally."""
    seconds = float(tally.span[1] - tally.span[0]) / NS_PER_S
    names, chains = list(deployment.models), deployment.chains
    return SimulationOutcome(
        duration_s=options.duration_s,
        warmup_s=options.warmup_s,
        seed=options.seed,
        models=tuple(_summarize_model(deployment, tally, i, name, seconds) for i, name in enumerate(names)),
        replicas=tuple(_summarize_replica(place, tally, i, seconds) for i, place in enumerate(places)),
        times_s=tuple(float(t) for t in np.linspace(tally.span[0], tally.span[1], WINDOWS + 1) / NS_PER_S),
        series=tuple(_make_series(tally, i, name) for i, name in enumerate(names)),
        chains=tuple(
            _summarize_model(deployment, tally, i, name, seconds) for i, name in enumerate(chains, len(names))
        ),
        steps=tuple(step for chain in chains.values() for step in chain.steps),
    )


def _summarize_model(deployment: DeploymentMap, tally: Tally, i: int, name: str, seconds: float) -> ModelOutcome:
    demand = deployment.chains.get(name) or deployment.models[name]
    requests, answered, in_time = int(tally.arrived[i]), int(tally.answered[i]), int(tally.in_time[i])
    pct = 100.0 * in_time / requests if requests else None
    means = {stage: float(tally.stage_ns[i, s]) / answered / 1e6 for s, stage in enumerate(STAGES)} if answered else {}
    quantile = {p: percentile_ms(tally.total[i], FINE_BITS, p) for p in (50.0, 95.0, 99.0)}
    longest = float(tally.longest[i]) / 1e6
    return ModelOutcome(
        model=name,
        slo_ms=demand.slo_ms,
        percentile=demand.percentile,
        requests=requests,
        answered=answered,
        in_time=in_time,
        rate_rps=requests / seconds,
        goodput_rps=in_time / seconds,
        in_time_pct=pct,
        slo_met=None if pct is None else pct >= demand.percentile,
        mean_ms=sum(means.values()) if answered else None,
        p50_ms=_clip_to(quantile[50.0], longest),
        p95_ms=_clip_to(quantile[95.0], longest),
        p99_ms=_clip_to(quantile[99.0], longest),
        max_ms=longest if answered else None,
        stage_mean_ms={stage: means.get(stage) for stage in STAGES},
        stage_p99_ms={stage: percentile_ms(tally.stage[i, s], COARSE_BITS, 99.0) for s, stage in enumerate(STAGES)},
        missed={cause: int(tally.missed[i, c]) for c, cause in enumerate(CAUSES)},
    )


def _clip_to(value: float | None, longest: float) -> float | None:
    # Percentiles are interpolated within a bin of the histogram and may exceed the longest time.
    return None if value is None else min(value, longest)


def _summarize_replica(place: PlacedInstance, tally: Tally, i: int, seconds: float) -> ReplicaOutcome:
    replica, answered, batches = place.replica, int(tally.replica_answered[i]), int(tally.replica_batches[i])
    return ReplicaOutcome(
        place=place.name,
        model=replica.model,
        batch=replica.batch,
        processes=replica.processes,
        answered=answered,
        throughput_rps=int(tally.replica_by_end[i]) / seconds,
        goodput_rps=int(tally.replica_in_time[i]) / seconds,
        utilization=float(tally.replica_busy[i]) / (seconds * NS_PER_S * replica.processes),
        mean_batch=answered / batches if batches else None,
        p50_ms=percentile_ms(tally.by_replica[i], COARSE_BITS, 50.0),
        p99_ms=percentile_ms(tally.by_replica[i], COARSE_BITS, 99.0),
    )


def _make_series(tally: Tally, i: int, name: str) -> Series:
    answered = tally.windows[:, i, 1]
    latency, fraction = cdf_ms(tally.total[i], FINE_BITS)
    # Points for a figure, evenly spaced by rank up to the end of the tail.
    keep = np.unique(np.searchsorted(fraction, np.linspace(0.0, 1.0, _CDF_POINTS)).clip(max=max(0, len(fraction) - 1)))
    keep = keep[: len(fraction)]
    return Series(
        model=name,
        arrived=tuple(tally.windows[:, i, 0].tolist()),
        answered=tuple(answered.tolist()),
        in_time=tuple(tally.windows[:, i, 2].tolist()),
        stage_mean_ms={
            stage: tuple(
                float(total) / int(count) / 1e6 if count else None
                for total, count in zip(tally.window_ns[:, i, s], answered, strict=True)
            )
            for s, stage in enumerate(STAGES)
        },
        latency_ms=tuple(latency[keep].tolist()) if len(latency) else (),
        fraction=tuple(fraction[keep].tolist()) if len(fraction) else (),
    )
