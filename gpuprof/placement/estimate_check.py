"""Checks the figures of a map's replicas against the estimator that it names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuprof.domain.deployment import Gpu, Node, Partition, Replica, ReplicaPrediction
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.evidence import RELATIVE_ROUNDING, Evidence, is_rounded_to
from gpuprof.placement.map_queues import upper_ms
from gpuprof.placement.map_workloads import ask_estimator, neighbour_workloads, replica_workload

#: A replica and where it stands.
Location = tuple[Node, Gpu, Partition, Replica]


def check_estimates(location: Location, evidence: Evidence) -> Iterator[str]:
    """Yield the figures of a replica that differ from the estimator's."""
    _, gpu, partition, replica = location
    if evidence.estimator is None:
        return
    device, beside = evidence.devices[gpu.device], neighbour_workloads(partition, replica)

    def ask(batch: int) -> Estimate | None:
        workload = replica_workload(partition, replica, batch)
        try:
            return ask_estimator(evidence.estimator, device, workload, beside) if evidence.estimator else None
        except InputError:
            return None  # told of where the times are needed

    known = ask(replica.batch)
    if known is None:
        return
    predicted = replica.predicted
    for name, value, true in (
        ("latency_ms", predicted.latency_ms, known.latency_ms.value),
        ("throughput_rps", predicted.throughput_rps, known.throughput_rps.value),
        ("overlapped_ms", predicted.overlapped_ms, known.overlapped_ms),
        ("latency_cv", predicted.latency_cv, known.latency_cv),
        ("pause_factor", predicted.pause_factor, known.pause_factor),
        ("pause_cv", predicted.pause_cv, known.latency_cv if known.pause_cv is None else known.pause_cv),
    ):
        if value is not None and true is not None and not is_rounded_to(value, true):
            yield f"{name} is {value:.4g} in the map but {true:.4g} by the estimator"
    yield from _check_turn(replica, replica_workload(partition, replica, replica.batch), beside, device, evidence)
    yield from _check_intervals(predicted, known, merged=bool(replica.merged))
    yield from _check_memory(replica, known, evidence)
    yield from _check_compute(replica, device, evidence.estimator)
    if predicted.source and predicted.source != known.latency_ms.source:
        yield f"the map calls its time {predicted.source!r}, the estimator {known.latency_ms.source!r}"
    if replica.batch_latency_ms is None:
        return
    for size, value in enumerate(replica.batch_latency_ms[: replica.batch], 1):
        smaller = known if known.is_padded else ask(size)
        if smaller is not None and not is_rounded_to(value, smaller.latency_ms.value + evidence.host.handover_ms):
            true = smaller.latency_ms.value
            yield f"batch_latency_ms of {size} is {value:.4g} ms in the map but {true:.4g} ms by the estimator"
            return


def _check_turn(
    replica: Replica, workload: Workload, beside: Sequence[Workload], device: Device, evidence: Evidence
) -> Iterator[str]:
    """Yield a turn time that differs from the estimator's beside the neighbours that run at the same time."""
    if not replica.turns or replica.turn_ms is None or evidence.estimator is None:
        return
    at_once = [one for one in beside if one.turns != replica.turns]
    true_ms = ask_estimator(evidence.estimator, device, workload, at_once).latency_ms.value
    if not is_rounded_to(replica.turn_ms, true_ms):
        yield f"turn_ms is {replica.turn_ms:.4g} in the map but {true_ms:.4g} by the estimator"


def _check_intervals(predicted: ReplicaPrediction, known: Estimate, *, merged: bool) -> Iterator[str]:
    for name, interval, figure in (
        ("latency_ms", predicted.latency_ms_interval, known.latency_ms),
        ("throughput_rps", predicted.throughput_rps_interval, known.throughput_rps),
    ):
        if interval is None:
            if figure.low is not None and figure.high is not None and not merged:
                yield f"{name}_interval is missing, but {figure.low:.4g} to {figure.high:.4g} by the estimator"
        elif figure.low is None or figure.high is None:
            yield f"the map has a {name}_interval, but the estimator knows nothing of the error"
        elif not (is_rounded_to(interval[0], figure.low) and is_rounded_to(interval[1], figure.high)):
            told, true = f"{interval[0]:.4g} to {interval[1]:.4g}", f"{figure.low:.4g} to {figure.high:.4g}"
            yield f"{name}_interval is {told} in the map but {true} by the estimator"


def _check_memory(replica: Replica, known: Estimate, evidence: Evidence) -> Iterator[str]:
    """Yield memory that differs from the estimator's, at the end of its interval that the plan uses."""
    predicted, memory = replica.predicted, known.memory_bytes
    held_bytes, needed = predicted.memory_bytes, predicted.mreq
    if memory is None:
        if held_bytes is not None or needed is not None:
            yield "the map gives its memory, of which the estimator knows nothing"
        return
    planned = upper_ms(memory, evidence.confidence) * replica.processes
    if held_bytes is not None and abs(held_bytes - planned) > RELATIVE_ROUNDING * planned + replica.processes:
        yield f"it holds {held_bytes / 2**30:.4g} GiB in the map but {planned / 2**30:.4g} GiB by the estimator"
    if needed is not None and not is_rounded_to(needed.bytes, memory.value * replica.processes):
        told, true = needed.bytes / 2**30, memory.value * replica.processes / 2**30
        yield f"it requires {told:.4g} GiB in the map but {true:.4g} GiB by the estimator"


def _check_compute(replica: Replica, device: Device, estimator: Estimator) -> Iterator[str]:
    """Yield a compute requirement that differs from the estimator's for a process alone on a device."""
    creq = replica.predicted.creq
    if creq is None:
        return
    try:
        alone = ask_estimator(estimator, device, Workload(replica.model, replica.batch, Share()))
    except InputError:
        return
    known = alone.creq(creq.metric)
    if known is not None and not is_rounded_to(creq.pct, known.value):
        yield f"its compute requirement is {creq.pct:.4g}% in the map but {known.value:.4g}% by the estimator"
    elif known is not None and creq.source != known.source:
        yield f"the map calls its compute requirement {creq.source!r}, the estimator {known.source!r}"
