"""Checks the feasibility of a deployment map from any source: geometry, shares, memory, rates and SLOs.

Shares no code with any policy, so that a mistake in one is not made here again: it starts from the map alone, asks
the estimator and the queueing model again, and reads the geometry off the device.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.domain.device import Device
from gpuprof.domain.model_queues import queue_of
from gpuprof.domain.sojourn import Arrivals, BatchServer, Sojourn
from gpuprof.errors import InputError
from gpuprof.placement.claim_check import check_claims
from gpuprof.placement.evidence import Evidence, Violation
from gpuprof.placement.failure_check import check_failures
from gpuprof.placement.map_queues import MOST_BATCH, map_servers, upper_ms
from gpuprof.placement.map_workloads import ask_estimator, neighbour_workloads, replica_workload
from gpuprof.placement.prediction_check import check_predictions
from gpuprof.placement.turn_check import check_turns

__all__ = ["Evidence", "Violation", "check", "check_layout", "find_unknown_memory"]

#: Relative, of rates, shares and times: what policies and their solvers round.
_TOLERANCE = 1e-6
_LEAST_SHARE_PCT = 1.0  # of a GPU, as MPS takes it; of one core of a CPU
_LEAST_LIMIT_BYTES = 1 << 20  # as MPS takes it; any runtime holds more
_MOST_CLIENTS = 48  # of one MPS daemon, CUDA up to 13.0; not the policies' constant, so that a mistake there shows here


def check(deployment: DeploymentMap, evidence: Evidence) -> tuple[Violation, ...]:
    """Return every rule that the map breaks, in the order of the map; empty when it is sound."""
    structure = (*_check_names(deployment), *_check_devices(deployment, evidence))
    if structure:
        return structure  # nothing below can be said of devices and models that do not exist
    layout = tuple(
        violation for _, where, gpu in _list_gpus(deployment) for violation in _check_gpu(where, gpu, evidence)
    )
    if any(violation.rule == "geometry" for violation in layout):
        return layout  # nor of instances that cannot be
    broken = (
        *layout,
        *_check_settings(deployment),
        *check_failures(deployment, evidence),
        *_check_rates(deployment, evidence),
        *_check_slos(deployment, evidence),
        *_check_figures(deployment),
        *check_claims(deployment),
    )
    return broken or tuple(check_predictions(deployment, evidence))  # where they fail, so does what rests on them


def check_layout(deployment: DeploymentMap, evidence: Evidence) -> tuple[Violation, ...]:
    """Return what no machine could set up: names, geometry, shares, memory and what is known to fail.

    Devices that are not known are left out; where there are such, so is what is known to fail. Says nothing of rates
    and SLOs, and so asks neither the estimator nor the queueing model for times.
    """
    gpus = [(where, gpu) for _, where, gpu in _list_gpus(deployment)]
    known = [(where, gpu) for where, gpu in gpus if gpu.device in evidence.devices]
    return (
        *_check_names(deployment),
        *(violation for where, gpu in known for violation in _check_gpu(where, gpu, evidence)),
        *(check_failures(deployment, evidence) if len(known) == len(gpus) else ()),
    )


def find_unknown_memory(deployment: DeploymentMap, evidence: Evidence) -> tuple[str, ...]:
    """Return the models of whose memory neither the map nor the estimator knows anything, each once."""
    return tuple(
        dict.fromkeys(
            replica.model
            for _, gpu, partition, replica in deployment.places()
            if not replica.predicted.memory_bytes and gpu.device in evidence.devices
            if not _needed_bytes(partition, replica, evidence.devices[gpu.device], evidence)
        )
    )


def _list_gpus(deployment: DeploymentMap) -> Iterator[tuple[Node, str, Gpu]]:
    for node in deployment.nodes:
        for gpu in node.gpus:
            yield node, f"{node.name} gpu {gpu.index}", gpu


def _check_names(deployment: DeploymentMap) -> Iterator[Violation]:
    served = {replica.model for *_, replica in deployment.places()}
    for name, merge in deployment.merges.items():
        strangers = sorted(set(merge.members) - set(deployment.models))
        if strangers:
            yield Violation("rate", name, f"merges {strangers[0]!r}, which is not among the map's models")
        if name not in served:
            yield Violation("rate", name, "is a merge that no replica serves")
    for node, gpu, _, replica in deployment.places():
        where = f"{node.name} gpu {gpu.index}"
        for model in replica.rates():
            if model not in deployment.models:
                yield Violation("rate", where, f"{model!r} is not among the map's models")
        if replica.merged and abs(math.fsum(replica.rates().values()) - replica.rate_rps) > _TOLERANCE * (
            1.0 + replica.rate_rps
        ):
            yield Violation("rate", where, f"{replica.model} gets {replica.rate_rps:g} requests/s, its models do not")


def _check_settings(deployment: DeploymentMap) -> Iterator[Violation]:
    """Find replicas beyond the largest batch, or the most processes, that the map says it was planned with."""
    settings = deployment.planned_with
    most = settings.max_batch if "max_batch" in settings.model_fields_set else MOST_BATCH
    each = settings.max_processes or _MOST_CLIENTS
    for node, gpu, _, replica in deployment.places():
        if not replica.merged and (replica.batch > most or replica.processes > each):
            said = f"batches of {replica.batch} and {replica.processes} processes; planned were up to {most} and {each}"
            yield Violation("share", f"{node.name} gpu {gpu.index}", f"{replica.model} has {said}")


def _check_devices(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    for _, where, gpu in _list_gpus(deployment):
        if gpu.device not in evidence.devices:
            yield Violation("geometry", where, f"unknown device {gpu.device!r}")
    used = Counter(gpu.device for _, _, gpu in _list_gpus(deployment))
    for name, count in used.items():
        there = evidence.counts.get(name, 0) if evidence.counts else None
        if there is not None and count > there:
            yield Violation("fleet", name, f"{count} devices are used, but the fleet has {there}")


def _check_gpu(where: str, gpu: Gpu, evidence: Evidence) -> Iterator[Violation]:
    device = evidence.devices[gpu.device]
    instances = [partition for partition in gpu.partitions if partition.mig is not None]
    if instances and len(instances) < len(gpu.partitions):
        yield Violation("geometry", where, "the device is both cut into MIG instances and used whole")
    elif len(gpu.partitions) > 1 and not instances:
        yield Violation("geometry", where, f"the whole device stands {len(gpu.partitions)} times")
    yield from _check_instances(where, instances, device)
    for partition in gpu.partitions:
        if partition.mig is None or any(p.name == partition.mig.profile for p in device.mig_profiles):
            yield from _check_partition(where, partition, device, evidence)


def _check_instances(where: str, partitions: Sequence[Partition], device: Device) -> Iterator[Violation]:
    taken: dict[int, str] = {}
    profiles = {profile.name: profile for profile in device.mig_profiles}
    counts: Counter[str] = Counter()
    compute = 0
    for place in (partition.mig for partition in partitions if partition.mig is not None):
        profile = profiles.get(place.profile)
        if profile is None:
            yield Violation("geometry", where, f"{device.name} has no MIG profile {place.profile!r}")
            continue
        counts[profile.name] += 1
        compute += profile.compute_slices
        if place.start not in profile.start_slots:
            legal = ", ".join(map(str, profile.start_slots))
            yield Violation("geometry", where, f"{profile.name} cannot start at slot {place.start}, only at {legal}")
        for slot in range(place.start, place.start + profile.memory_slices):
            if slot in taken:
                yield Violation("geometry", where, f"{taken[slot]} and {profile.name} overlap in slot {slot}")
                break
            taken[slot] = profile.name
    for name, count in counts.items():
        if count > profiles[name].max_count:
            yield Violation("geometry", where, f"{count} {name} where the driver allows {profiles[name].max_count}")
    most = max((profile.compute_slices for profile in profiles.values()), default=0)
    if compute > most:
        yield Violation("geometry", where, f"{compute} compute slices of {most} are taken")


def _check_partition(where: str, partition: Partition, device: Device, evidence: Evidence) -> Iterator[Violation]:
    yield from check_turns(where, partition)
    taken = {(replica.turns or -number): replica.sm_share_pct for number, replica in enumerate(partition.replicas)}
    shares = math.fsum(taken.values())
    if partition.unshared:
        yield from _find_false_unshared(where, partition, device)
    elif shares > 100.0 + _TOLERANCE:
        yield Violation("share", where, f"the replicas' shares add up to {shares:g}%")
    clients = sum(replica.processes for replica in partition.replicas)
    if device.kind == "gpu" and clients > _MOST_CLIENTS:
        yield Violation("share", where, f"{clients} processes where MPS takes {_MOST_CLIENTS}")
    for replica in partition.replicas:
        yield from _check_share_and_limit(where, partition, replica, device, evidence)
    available = _partition_memory_bytes(partition, device)
    held = sum(_memory_bytes(partition, replica, device, evidence) for replica in partition.replicas)
    if held > available:
        yield Violation("memory", where, f"the replicas hold {held / 2**30:.3g} GiB of {available / 2**30:.3g} GiB")


def _find_false_unshared(where: str, partition: Partition, device: Device) -> Iterator[Violation]:
    """Find shares in partitions marked as unshared, and such partitions on devices whose shares are cores."""
    if device.kind != "gpu":
        yield Violation("share", where, f"{device.name} cannot be unshared: its replicas are held to cores")
    for replica in partition.replicas:
        if replica.sm_share_pct < 100.0:
            yield Violation("share", where, f"{replica.model} has {replica.sm_share_pct:g}% where nobody has a share")


def _partition_memory_bytes(partition: Partition, device: Device) -> int:
    if partition.mig is None:
        return device.dram_bytes
    return next(p.memory_bytes for p in device.mig_profiles if p.name == partition.mig.profile)


def _memory_bytes(partition: Partition, replica: Replica, device: Device, evidence: Evidence) -> int:
    """Return the largest of what the map allows the replica, what it predicts, and what the estimator says."""
    said = max(replica.memory_limit_bytes or 0, replica.predicted.memory_bytes or 0)
    return max(said, _needed_bytes(partition, replica, device, evidence))


def _needed_bytes(partition: Partition, replica: Replica, device: Device, evidence: Evidence) -> int:
    """Return what all processes of a replica need, as is planned on, 0 where nothing is known of it."""
    if evidence.estimator is None:
        return 0
    try:
        workload = replica_workload(partition, replica, replica.batch)
        needed = ask_estimator(evidence.estimator, device, workload).memory_bytes
    except InputError:
        return 0
    # Rounded down, where policies round up: a fraction of a byte breaks no rule.
    return 0 if needed is None else math.floor(upper_ms(needed, evidence.confidence)) * replica.processes


def _check_share_and_limit(
    where: str, partition: Partition, replica: Replica, device: Device, evidence: Evidence
) -> Iterator[Violation]:
    """Find a share that cannot be enforced, and a memory limit below what the replica needs."""
    least = _LEAST_SHARE_PCT if device.kind == "gpu" else _LEAST_SHARE_PCT / device.compute_units
    if replica.sm_share_pct < least * (1.0 - _TOLERANCE):
        yield Violation("share", where, f"{replica.model} has {replica.sm_share_pct:g}%, but the least is {least:g}%")
    needed = _needed_bytes(partition, replica, device, evidence)
    limit = replica.memory_limit_bytes
    if limit is not None and limit < _LEAST_LIMIT_BYTES:
        yield Violation("memory", where, f"{replica.model} may hold {limit} bytes, but the least is 1 MiB")
    elif limit is not None and limit < needed * (1.0 - _TOLERANCE) - 1.0:
        yield Violation(
            "memory", where, f"{replica.model} may hold {limit / 2**30:.3g} GiB but needs {needed / 2**30:.3g} GiB"
        )


def _check_rates(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    planned: defaultdict[str, float] = defaultdict(float)
    replicas: Counter[str] = Counter()
    for *_, replica in deployment.places():
        for model, rate_rps in replica.rates().items():
            planned[model] += rate_rps
            replicas[model] += 1
    named: defaultdict[str, float] = defaultdict(float)
    for unplaced in deployment.unplaced:
        named[unplaced.model] += unplaced.rate_rps
    for name, missing_rps in named.items():
        if not missing_rps > 0.0:
            yield Violation("rate", name, "is listed as unplaced, but all of it is placed")
        elif name not in deployment.models:
            yield Violation("rate", name, "is listed as unplaced but is not among the map's models")
        elif planned[name] + missing_rps > deployment.models[name].rate_rps * (1.0 + _TOLERANCE):
            asked = deployment.models[name].rate_rps
            yield Violation(
                "rate",
                name,
                f"{planned[name]:g} requests/s are served and {missing_rps:g} unplaced, but {asked:g} asked for",
            )
    for name, rate_rps in planned.items():
        if name not in named and rate_rps > deployment.models[name].rate_rps * (1.0 + _TOLERANCE):
            asked = deployment.models[name].rate_rps
            yield Violation(
                "rate", name, f"replicas are planned for {rate_rps:g} requests/s, but {asked:g} are asked for"
            )
    for demand in _list_demands(deployment, evidence):
        served = planned[demand.model] + (0.0 if evidence.demands is not None else named[demand.model])
        if served < demand.rate_rps * (1.0 - _TOLERANCE):
            yield Violation("rate", demand.model, f"{served:g} of {demand.rate_rps:g} requests/s are served")
        if demand.max_replicas is not None and replicas[demand.model] > demand.max_replicas:
            yield Violation("rate", demand.model, f"{replicas[demand.model]} replicas of {demand.max_replicas} allowed")


def _list_demands(deployment: DeploymentMap, evidence: Evidence) -> Sequence[Demand]:
    if evidence.demands is not None:
        return evidence.demands
    return [Demand(name, m.rate_rps, Slo(m.slo_ms, m.percentile)) for name, m in deployment.models.items()]


def _check_slos(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    asked = {demand.model: demand for demand in _list_demands(deployment, evidence)}
    serving: defaultdict[str, set[str]] = defaultdict(set)
    for *_, replica in deployment.places():
        for model in replica.rates():
            serving[model].add(replica.model)
    streams: dict[str, list[tuple[float, Sojourn]]] = {}
    pools: dict[str, list[tuple[Replica, BatchServer]]] = {}
    servers = map_servers(deployment, evidence)
    counts = Counter(replica.model for *_, replica in deployment.places())
    for (node, gpu, partition, replica), server in zip(deployment.places(), servers, strict=True):
        demands = [asked[model] for model in replica.rates() if model in asked]
        if not demands:
            continue
        where, device = f"{node.name} gpu {gpu.index}", evidence.devices[gpu.device]
        if evidence.latency_budget is not None:
            tightest = min(demands, key=lambda demand: demand.slo.latency_ms)
            yield from _check_budget(where, partition, replica, tightest, device, evidence)
            continue
        if isinstance(server, str):
            yield Violation("slo", where, server)
            continue
        is_pool = all(serving[model] == {replica.model} for model in replica.rates())
        if replica.rate_rps >= server.capacity_rps and (counts[replica.model] == 1 or not is_pool):
            yield Violation("rate", where, _describe_excess_rate(replica, server.capacity_rps))
        elif is_pool:
            pools.setdefault(replica.model, []).append((replica, server))
        else:  # a model has replicas of its own beside merged ones: who of them gets a request is not known
            sojourn = queue_of(evidence.queueing, replica.model).sojourn(Arrivals(replica.rate_rps), server)
            for demand in demands:
                streams.setdefault(demand.model, []).append((replica.rates()[demand.model], sojourn))
    for model, replicas in pools.items():  # the router sees all replicas of a model, or of a merge, as one queue
        arrivals = Arrivals(math.fsum(replica.rate_rps for replica, _ in replicas))
        most_rps = math.fsum(server.capacity_rps for _, server in replicas)
        if arrivals.rate_rps >= most_rps:  # of each alone the map's rate says nothing: the router gives it by the means
            said = f"the replicas get {arrivals.rate_rps:.4g} requests/s but serve at most {most_rps:.4g}"
            yield Violation("rate", model, said)
            continue
        whole = queue_of(evidence.queueing, model).pool(arrivals, [server for _, server in replicas]).whole
        for name in replicas[0][0].rates():
            if name in asked:
                streams[name] = [(math.fsum(replica.rates().get(name, 0.0) for replica, _ in replicas), whole)]
    for model, parts in streams.items():
        yield from _check_percentile(asked[model], parts)


def _check_budget(
    where: str, partition: Partition, replica: Replica, demand: Demand, device: Device, evidence: Evidence
) -> Iterator[Violation]:
    """Check the rule of the papers: the time of a batch within its part of the SLO, the rate within the throughput."""
    latency, throughput = replica.predicted.latency_ms, replica.predicted.throughput_rps
    if evidence.estimator is not None:
        try:
            estimate = ask_estimator(
                evidence.estimator,
                device,
                replica_workload(partition, replica, replica.batch),
                neighbour_workloads(partition, replica),
            )
        except InputError as error:
            yield Violation("slo", where, str(error))
            return
        latency = upper_ms(estimate.latency_ms, evidence.confidence)
        throughput = 1000.0 * replica.batch * replica.processes / (latency - estimate.overlapped_ms)
    allowed = (evidence.latency_budget or 1.0) * demand.slo.latency_ms
    if not 0.0 < latency < allowed * (1.0 + _TOLERANCE):
        yield Violation("slo", where, f"a batch of {replica.model} takes {latency:.4g} ms of {allowed:.4g} ms")
    if replica.rate_rps > throughput * (1.0 + _TOLERANCE):
        yield Violation("rate", where, _describe_excess_rate(replica, throughput))


def _describe_excess_rate(replica: Replica, most_rps: float) -> str:
    return f"{replica.model} gets {replica.rate_rps:.4g} requests/s but serves at most {most_rps:.4g}"


def _check_percentile(demand: Demand, streams: Sequence[tuple[float, Sojourn]]) -> Iterator[Violation]:
    total = math.fsum(rate for rate, _ in streams)
    limit = demand.slo.latency_ms * (1.0 + _TOLERANCE)
    within = math.fsum(rate * sojourn.fraction_within(limit) for rate, sojourn in streams)
    if total and within / total < demand.slo.percentile / 100.0 - _TOLERANCE:
        yield Violation(
            "slo",
            demand.model,
            f"{100.0 * within / total:.4g}% of the requests are within {demand.slo.latency_ms:g} ms, "
            f"but {demand.slo.percentile:g}% must be",
        )


def _check_figures(deployment: DeploymentMap) -> Iterator[Violation]:
    used = sum(any(partition.replicas for partition in gpu.partitions) for _, _, gpu in _list_gpus(deployment))
    if deployment.predicted.gpus != used:
        said = deployment.predicted.gpus
        yield Violation("figures", "predicted", f"gpus says {said} and replicas stand on {used}")
