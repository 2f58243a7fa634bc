"""Approximates large simulations by a sample of the replicas at a sample of the times.

*Replicas*: a part of each model's equal replicas is kept, and the rate is reduced in proportion. The router then
chooses among fewer replicas, so waits are slightly overestimated. *Times*: the duration is cut into slots, and a few
seconds of each are simulated at the slot's mean rate, so variation within a slot is averaged out.
Bursts within a slot are sampled in their true proportion. If bursts overload a model, latencies have two modes, and a
median between the modes is ill-conditioned: the median varies between full simulations, too, and is estimated poorly.
Goodput and tails are not affected.
Unfinished work of a model is carried over between slots as a fluid that delays every request until drained.
`bench/simulator.py` prints the errors of both on maps small enough for a full simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.arrival_process import (
    NS_PER_S,
    ArrivalProcess,
    BatchPoissonArrivals,
    DiurnalArrivals,
    GammaArrivals,
    HyperexponentialArrivals,
    LognormalArrivals,
    MmppArrivals,
    RecordedArrivals,
)
from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.errors import InputError
from gpuprof.rules.host_work import NO_HOST_WORK
from gpuprof.simulator.cluster import SimulationOptions, places_of
from gpuprof.simulator.engine import simulate_to_tally
from gpuprof.simulator.histogram import FINE_BITS, bin_of
from gpuprof.simulator.outcome import SimulationOutcome, outcome_of
from gpuprof.simulator.state import CAUSES, STAGES, WINDOWS, Tally, new_tally

_STEPS = 16  # parts of a slot with constant backlog


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sizes of the sample: replicas of each model, slots of the duration, seconds of each slot."""

    replicas: int = 16
    slots: int = 96
    seconds: float = 1.5
    warmup_s: float = 0.5


def expected_requests(arrivals: Mapping[str, ArrivalProcess], duration_s: float) -> float:
    """Return the expected number of requests."""
    return duration_s * sum(process.rate_rps for process in arrivals.values())


def simulate_sampled(
    deployment: DeploymentMap,
    arrivals: Mapping[str, ArrivalProcess],
    options: SimulationOptions,
    sampling: Sampling,
    progress: Callable[[float], None] | None = None,
) -> SimulationOutcome:
    """Approximate `gpuprof.simulator.engine.simulate`; counts are scaled up to the whole simulation.

    Raises `InputError` like `simulate`; for failures, which cannot be sampled; for a duration too short for the slots.
    """
    if options.failures:
        raise InputError("failures cannot be sampled", "simulate a shorter time, or a smaller map, whole")
    if options.duration_s < sampling.slots * (sampling.seconds + sampling.warmup_s):
        raise InputError(f"{options.duration_s:g} s are too short to sample", "simulate them whole")
    if unknown := sorted(set(arrivals) - set(deployment.models)):
        raise InputError(f"the map has no model {unknown[0]!r}", f"it has {', '.join(sorted(deployment.models))}")
    sample, fractions = sample_replicas(deployment, sampling.replicas)
    slots = _SlotTally(deployment, sample, fractions, arrivals, options, sampling)
    for slot in range(sampling.slots):
        slots.simulate(slot)
        if progress is not None:
            progress((slot + 1) / sampling.slots)
    return slots.outcome()


def sample_replicas(deployment: DeploymentMap, limit: int) -> tuple[DeploymentMap, dict[str, float]]:
    """Return the map with at most about ``limit`` replicas per model, and the kept fraction of each model's capacity.

    Replicas with equal predictions, batch sizes, batch times and processes form a kind; each kind keeps its share, at
    least one replica.
    """
    places = places_of(deployment)
    kinds = Counter(_kind(place.replica) for place in places)
    of_model = Counter(place.replica.model for place in places)
    keep = {
        kind: min(count, max(1, round(count * limit / max(limit, of_model[kind[0]])))) for kind, count in kinds.items()
    }
    to_keep, nodes = dict(keep), []
    capacity, all_capacity = dict.fromkeys(deployment.models, 0.0), dict.fromkeys(deployment.models, 0.0)
    for place in places:
        replica, kind = place.replica, _kind(place.replica)
        all_capacity[replica.model] += capacity_rps(replica)
        if to_keep[kind]:
            to_keep[kind] -= 1
            capacity[replica.model] += capacity_rps(replica)
            # Each replica gets its own device: its batch times include interference and waits for its turn.
            single = replica.model_copy(update={"turns": 0, "turn_ms": None})
            partition = Partition(mig=place.partition.mig, replicas=(single,))
            gpu = Gpu(index=place.gpu.index, device=place.gpu.device, partitions=(partition,))
            nodes.append(Node(name=place.node.name, gpus=(gpu,)))
    fractions = {model: capacity[model] / total if total else 1.0 for model, total in all_capacity.items()}
    return deployment.model_copy(update={"nodes": tuple(nodes)}), fractions


def _kind(replica: Replica) -> tuple[str, object]:
    return replica.model, (replica.batch_latency_ms, replica.predicted, replica.batch, replica.processes)


def capacity_rps(replica: Replica) -> float:
    """Return the requests per second of a replica with full batches."""
    full_ms = replica.batch_latency_ms[-1] if replica.batch_latency_ms else replica.predicted.latency_ms
    return 1000.0 * replica.batch * replica.processes / full_ms if full_ms > 0 else math.inf


def slot_rate(process: ArrivalProcess, begin_s: float, end_s: float) -> float:
    """Return the mean rate of a process between two times."""
    if isinstance(process, RecordedArrivals):
        first, last = np.searchsorted(process.times, [int(begin_s * NS_PER_S), int(end_s * NS_PER_S)])
        return float(last - first) / (end_s - begin_s)
    if isinstance(process, DiurnalArrivals):
        phase = (begin_s + end_s) / 2 / process.period_s
        swing = (process.peak_to_trough - 1.0) / (process.peak_to_trough + 1.0)
        return process.rate_rps * (1.0 - swing * math.cos(2.0 * math.pi * phase))
    return process.rate_rps


def slot_process(process: ArrivalProcess, rate_rps: float, turn: int = 0) -> ArrivalProcess:
    """Return a process for a slot: Poisson for diurnal and recorded arrivals, otherwise the same kind of process.

    Bursts start at the ``turn``-th point of a low-discrepancy sequence in the unit square (Halton's): with random
    starts, the few slots might contain half or twice the true number of bursts.
    """
    if isinstance(process, MmppArrivals):
        from scipy.stats import qmc  # takes half a second to import

        (start,) = qmc.Halton(2, scramble=False).fast_forward(turn).random()
        return replace(process, rate_rps=rate_rps, start=(float(start[0]), float(start[1])))
    if isinstance(process, (GammaArrivals, LognormalArrivals, HyperexponentialArrivals, BatchPoissonArrivals)):
        return replace(process, rate_rps=rate_rps)
    return process if rate_rps == process.rate_rps else GammaArrivals(rate_rps)


class _SlotTally:
    """The tally of all slots, and the backlog between slots."""

    def __init__(
        self,
        deployment: DeploymentMap,
        sample: DeploymentMap,
        fractions: Mapping[str, float],
        arrivals: Mapping[str, ArrivalProcess],
        options: SimulationOptions,
        sampling: Sampling,
    ) -> None:
        self._deployment, self._small, self._arrivals = deployment, sample, arrivals
        self._options, self._sampling = options, sampling
        self._names = list(deployment.models)
        self._kept = np.array([fractions[name] for name in self._names])
        self._capacity = np.zeros(len(self._names))
        self._slo_ms = [model.slo_ms for model in deployment.models.values()]
        for place in places_of(deployment):
            self._capacity[self._names.index(place.replica.model)] += capacity_rps(place.replica)
        self._backlog = np.zeros(len(self._names))
        self._length = options.duration_s / sampling.slots
        self._places = places_of(sample)
        self._sum: dict[str, Any] = {}

    def simulate(self, slot: int) -> None:
        """Simulate a piece of a slot and add its scaled counts."""
        begin = slot * self._length
        rates = np.array([self._rate(name, begin) for name in self._names])
        processes = {
            name: slot_process(self._arrivals[name], rate * fraction, 1 + slot + i * self._sampling.slots)
            for i, (name, rate, fraction) in enumerate(zip(self._names, rates, self._kept, strict=True))
            if rate > 0
        }
        piece = replace(
            self._options,
            duration_s=self._sampling.seconds + self._sampling.warmup_s,
            warmup_s=self._sampling.warmup_s,
            # The factor is a prime far above the number of slots, so that no two runs share a slot's seed.
            seed=self._options.seed * 1_000_003 + slot,
            host=NO_HOST_WORK,  # the sampled replicas do not fill the machine
        )
        tally = simulate_to_tally(self._small, processes, piece)
        self._add(slot, tally, self._late_from_backlog(rates, tally))

    def _rate(self, name: str, begin: float) -> float:
        process = self._arrivals.get(name)
        return 0.0 if process is None else slot_rate(process, begin, begin + self._length)

    def _late_from_backlog(self, rates: NDArray[np.float64], tally: Tally) -> NDArray[np.float64]:
        """Update the backlog over the slot; return each model's longest delay by backlog, in ms."""
        before = self._backlog
        self._backlog = np.maximum(0.0, before + (rates - self._capacity) * self._length)
        if self._options.refuse_hopeless:
            self._backlog[:] = 0.0  # hopeless requests are refused, so no backlog builds up
        with np.errstate(divide="ignore", invalid="ignore"):
            delay = np.where(self._capacity > 0, 1000.0 * np.array([before, self._backlog]) / self._capacity, 0.0)
        for i in np.flatnonzero(delay.max(axis=0) > 0):
            _delay_all(tally, int(i), np.linspace(delay[0, i], delay[1, i], _STEPS), self._slo_ms[i])
        return np.asarray(delay.max(axis=0))

    def _add(self, slot: int, tally: Tally, delay_ms: NDArray[np.float64]) -> None:
        # A simulated second represents several seconds of the slot, and a request those of omitted replicas, too.
        weight = self._length / self._sampling.seconds / self._kept
        window = min(WINDOWS - 1, slot * WINDOWS // self._sampling.slots)
        for name, part in tally._asdict().items():
            if name in ("span", "windows_per_ns", "longest"):  # these are not counts
                continue
            values = np.asarray(part, np.float64)
            if name in ("windows", "window_ns"):
                shifted = np.zeros_like(values)
                shifted[window] = values.sum(axis=0) * weight[:, None]
                values = shifted
            elif name.startswith("replica") or name == "by_replica":
                values *= self._length / self._sampling.seconds  # replicas represent themselves
            else:
                values *= weight.reshape(-1, *[1] * (values.ndim - 1))
            self._sum[name] = self._sum.get(name, 0.0) + values
        longest = tally.longest + (1e6 * delay_ms)
        self._sum["longest"] = np.maximum(self._sum.get("longest", 0.0), longest)

    def outcome(self) -> SimulationOutcome:
        """Return the outcome estimated from all slots."""
        end = round(self._options.duration_s * NS_PER_S)
        empty = new_tally(len(self._names), len(self._places), 0, end)
        parts = {
            name: np.rint(value).astype(np.int64) if getattr(empty, name).dtype == np.int64 else value
            for name, value in self._sum.items()
        }
        settings = replace(self._options, warmup_s=0.0)
        outcome = outcome_of(self._small, self._places, empty._replace(**parts), settings)
        return replace(outcome, method="sampled")


def _delay_all(tally: Tally, model: int, delays_ms: NDArray[np.float64], slo_ms: float) -> None:
    """Delay the answered requests of a model, in equal parts by each of ``delays_ms``."""
    answered, in_time = int(tally.answered[model]), int(tally.in_time[model])
    tally.total[model] = 0
    parts = np.diff(np.linspace(0, answered, len(delays_ms) + 1).astype(np.int64))
    for part, delay in zip(parts, delays_ms, strict=True):
        tally.total[model, bin_of(int(delay * 1e6), FINE_BITS)] += int(part)
    tally.stage_ns[model, STAGES.index("queue")] += answered * float(delays_ms.mean()) * 1e6
    in_time_left = int(in_time * float((delays_ms <= slo_ms).mean()))
    tally.in_time[model] = in_time_left
    tally.missed[model, CAUSES.index("queue")] += in_time - in_time_left
    tally.windows[:, model, 2] = 0
    tally.windows[0, model, 2] = in_time_left
