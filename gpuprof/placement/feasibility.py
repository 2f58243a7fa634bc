"""Checks the feasibility of a deployment map from any source: geometry, shares, memory, rates and SLOs.

The check shares no code with any policy: it starts from the map alone, queries the estimator and the queueing model
again, and takes the geometry from the device. Every fault is listed; nonexistent parts of a map (an unknown device, an
unknown MIG profile) are reported once and left out of the checks that need them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition, Replica
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, FailedRun, Workload, board_work, classify_source
from gpuprof.domain.number_format import ROUNDING
from gpuprof.domain.sojourn import Arrivals, BatchServer, Sojourn, queue_of
from gpuprof.errors import InputError
from gpuprof.placement.evidence import (
    MOST_BATCH,
    MPS_CLIENTS,
    RELATIVE_ROUNDING,
    Evidence,
    Location,
    Violation,
    ask_batch_series,
    ask_estimator,
    is_rounded_to,
    list_locations,
    map_servers,
    neighbour_workloads,
    replica_workload,
    upper_ms,
)
from gpuprof.rules.turns import find_cycle_ms

__all__ = ["Evidence", "Violation", "check", "check_layout", "find_excess_time", "find_unknown_memory"]

_LEAST_SHARE_PCT = 1.0  # of a GPU, MPS's minimum; of a core of a CPU
_LEAST_LIMIT_BYTES = 1 << 20  # MPS's minimum; any runtime holds more
#: Excess of work allowed to estimates beyond the measured batches.
_BEYOND_MEASURED = 0.25


def check(deployment: DeploymentMap, evidence: Evidence) -> tuple[Violation, ...]:
    """Return every fault of the map; empty when it is sound."""
    locations = tuple(list_locations(deployment, evidence))
    return (
        *_check_names(deployment),
        *_check_fleet(deployment, evidence),
        *_check_layout(deployment, evidence),
        *_check_settings(deployment, evidence),
        *_check_failures(deployment, evidence),
        *_check_rates(deployment, evidence),
        *_check_chains(deployment),
        *_check_slos(deployment, locations, evidence),
        *_check_busy_time(locations, evidence),
        *check_work(deployment, evidence),
        *_check_figures(deployment, locations, evidence),
    )


def check_layout(deployment: DeploymentMap, evidence: Evidence) -> tuple[Violation, ...]:
    """Return violations that no machine could deploy: names, geometry, shares, memory and recorded failures.

    Neither the estimator nor the queueing model is queried for times. Unknown devices are left out.
    """
    return (
        *_check_names(deployment),
        *_check_layout(deployment, evidence),
        *_check_failures(deployment, evidence),
    )


def find_excess_time(deployment: DeploymentMap, evidence: Evidence) -> tuple[Violation, ...]:
    """Return the violations of `check` in the devices' time: partitions whose replicas need more time than there is."""
    return tuple(_check_busy_time(tuple(list_locations(deployment, evidence)), evidence))


def find_unknown_memory(deployment: DeploymentMap, evidence: Evidence) -> tuple[str, ...]:
    """Return the models whose memory neither the map nor the estimator gives, each once."""
    return tuple(
        dict.fromkeys(
            location.replica.model
            for location in list_locations(deployment, evidence)
            if not location.replica.predicted.memory_bytes and not _needed_bytes(location, evidence)
        )
    )


def _list_gpus(deployment: DeploymentMap) -> Iterator[tuple[str, Gpu]]:
    for node in deployment.nodes:
        for gpu in node.gpus:
            yield f"{node.name} gpu {gpu.index}", gpu


def _check_names(deployment: DeploymentMap) -> Iterator[Violation]:
    for node, gpu, _, replica in deployment.places():
        if replica.model not in deployment.models:
            where = f"{node.name} gpu {gpu.index}"
            yield Violation("rate", where, f"{replica.model!r} is not among the map's models")


def _check_fleet(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    for where, gpu in _list_gpus(deployment):
        if gpu.device not in evidence.devices:
            yield Violation("geometry", where, f"unknown device {gpu.device!r}")
    for name, count in Counter(gpu.device for _, gpu in _list_gpus(deployment)).items():
        available = evidence.counts.get(name, 0) if evidence.counts else None
        if available is not None and count > available:
            yield Violation("fleet", name, f"{count} devices are used, but the fleet has {available}")


def _check_layout(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    for where, gpu in _list_gpus(deployment):
        device = evidence.devices.get(gpu.device)
        if device is None:
            continue
        yield from _check_instances(where, gpu, device)
        for partition in gpu.partitions:
            if partition.mig is None or any(profile.name == partition.mig.profile for profile in device.mig_profiles):
                yield from _check_partition(where, partition, device, evidence)


def _check_instances(where: str, gpu: Gpu, device: Device) -> Iterator[Violation]:
    instances = [partition.mig for partition in gpu.partitions if partition.mig is not None]
    if instances and len(instances) < len(gpu.partitions):
        yield Violation("geometry", where, "the device is both cut into MIG instances and used whole")
    elif len(gpu.partitions) > 1 and not instances:
        yield Violation("geometry", where, f"the whole device is listed {len(gpu.partitions)} times")
    profiles = {profile.name: profile for profile in device.mig_profiles}
    holders: dict[int, str] = {}
    counts = Counter(instance.profile for instance in instances if instance.profile in profiles)
    for instance in instances:
        profile = profiles.get(instance.profile)
        if profile is None:
            yield Violation("geometry", where, f"{device.name} has no MIG profile {instance.profile!r}")
            continue
        if instance.start not in profile.start_slots:
            legal = ", ".join(map(str, profile.start_slots))
            yield Violation("geometry", where, f"{profile.name} cannot start at slot {instance.start}, only at {legal}")
        slots = range(instance.start, instance.start + profile.memory_slices)
        if clash := [slot for slot in slots if slot in holders]:
            yield Violation("geometry", where, f"{holders[clash[0]]} and {profile.name} overlap in slot {clash[0]}")
        holders |= dict.fromkeys(slots, profile.name)
    for name, count in counts.items():
        if count > profiles[name].max_count:
            yield Violation("geometry", where, f"{count} {name} where the driver allows {profiles[name].max_count}")
    compute = sum(count * profiles[name].compute_slices for name, count in counts.items())
    most = max((profile.compute_slices for profile in profiles.values()), default=0)
    if compute > most:
        yield Violation("geometry", where, f"{compute} compute slices of {most} are taken")


def _check_partition(where: str, partition: Partition, device: Device, evidence: Evidence) -> Iterator[Violation]:
    yield from _check_turns(where, partition)
    replicas = partition.replicas
    workers = _list_workers(partition)
    shares = math.fsum(replica.sm_share_pct for replica in workers)
    if not (partition.unshared or partition.oversubscribed) and shares > 100.0 * (1.0 + ROUNDING):
        meaning = "an oversubscribed partition may: its replicas contend for SMs"
        yield Violation("share", where, f"the replicas' shares add up to {shares:g}% ({meaning})")
    for name in ("unshared", "oversubscribed"):
        if getattr(partition, name) and device.kind != "gpu":
            yield Violation("share", where, f"{device.name} cannot be {name}: its replicas are held to cores")
    clients = sum(replica.processes for replica in workers)
    if device.kind == "gpu" and clients > MPS_CLIENTS:
        yield Violation("share", where, f"{clients} processes where MPS takes {MPS_CLIENTS}")
    least = _LEAST_SHARE_PCT if device.kind == "gpu" else _LEAST_SHARE_PCT / device.compute_units
    total_bytes = 0
    for replica in replicas:
        name, share, limit = replica.model, replica.sm_share_pct, replica.memory_limit_bytes
        if partition.unshared and share < 100.0:
            yield Violation("share", where, f"{name} has {share:g}% in a partition without shares")
        if share < least * (1.0 - ROUNDING):
            yield Violation("share", where, f"{name} has {share:g}%, but the least is {least:g}%")
        needed_bytes = _needed_bytes(Location(where, device, partition, replica), evidence)
        total_bytes += max(limit or 0, replica.predicted.memory_bytes or 0, needed_bytes)
        if limit is not None and limit < _LEAST_LIMIT_BYTES:
            yield Violation("memory", where, f"{name} may hold {limit} bytes, but the least is 1 MiB")
        elif limit is not None and limit < needed_bytes * (1.0 - ROUNDING) - 1.0:
            yield Violation("memory", where, f"{name} may hold {_gib(limit)} but needs {_gib(needed_bytes)}")
    profiles = {profile.name: profile for profile in device.mig_profiles}
    available = device.dram_bytes if partition.mig is None else profiles[partition.mig.profile].memory_bytes
    if total_bytes > available:
        yield Violation("memory", where, f"the replicas hold {total_bytes / 2**30:.3g} GiB of {_gib(available)}")


def _list_workers(partition: Partition) -> Sequence[Replica]:
    """Return a replica of each worker: those that take turns have one share and one process."""
    return tuple({replica.turns or -number: replica for number, replica in enumerate(partition.replicas)}.values())


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"


def _needed_bytes(location: Location, evidence: Evidence) -> int:
    """Return the memory of all processes of a replica by the estimator, 0 where it is unknown.

    The context of a worker is counted with its first replica.
    """
    if evidence.estimator is None:
        return 0
    replica, replicas = location.replica, location.partition.replicas
    try:
        workload = replica_workload(location.partition, replica, replica.batch)
        estimate = ask_estimator(evidence.estimator, location.device, workload)
    except InputError:
        return 0
    if estimate.memory_bytes is None:
        return 0
    is_first = next(r for r in replicas if r is replica or (replica.turns and r.turns == replica.turns)) is replica
    # Rounded down, where policies round up: a fraction of a byte breaks no rule.
    of_process = math.floor(upper_ms(estimate.memory_bytes, evidence.confidence))
    return (of_process if is_first else estimate.added_bytes(of_process)) * replica.processes


def _check_turns(where: str, partition: Partition) -> Iterator[Violation]:
    """Yield replicas that cannot be models of one worker."""
    groups: defaultdict[int, list[Replica]] = defaultdict(list)
    for replica in partition.replicas:
        groups[replica.turns].append(replica)
    groups.pop(0, None)
    for number, replicas in groups.items():
        models = " and ".join(dict.fromkeys(replica.model for replica in replicas))
        if partition.unshared:
            yield Violation("share", where, f"{models} take turns {number} in a partition without shares")
        if len({replica.sm_share_pct for replica in replicas}) > 1:
            shares = ", ".join(f"{replica.sm_share_pct:g}%" for replica in replicas)
            yield Violation("share", where, f"{models} take turns {number} in shares of {shares}: it must be one share")
        if any(replica.processes > 1 for replica in replicas):
            yield Violation("share", where, f"{models} take turns {number}: each must be one process of one model")
        if len({replica.time_slice_ms for replica in replicas}) > 1:
            yield Violation("share", where, f"{models} take turns {number}: all must have the same time slice, or none")


def _check_settings(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield replicas and partitions that the map's planning options exclude."""
    settings = deployment.planned_with
    batch = settings.max_batch if "max_batch" in settings.model_fields_set else MOST_BATCH
    processes = settings.max_processes or MPS_CLIENTS
    for node, gpu, _, replica in deployment.places():
        if replica.batch > batch or replica.processes > processes:
            setting_text = f"batches of {replica.batch} and {replica.processes} processes"
            limits = f"planned were up to {batch} and {processes}"
            yield Violation("share", f"{node.name} gpu {gpu.index}", f"{replica.model} has {setting_text}; {limits}")
    for where, gpu in _list_gpus(deployment):
        device = evidence.devices.get(gpu.device)
        for partition in gpu.partitions:
            if settings.isolate and any(replica.turns for replica in partition.replicas):
                yield Violation("share", where, "its models take turns, but planned was a process for each (isolate)")
            processes = sum(replica.processes for replica in _list_workers(partition))
            if settings.no_mps and processes > 1 and device is not None and device.kind == "gpu":
                yield Violation("share", where, f"{processes} processes run at once, but planned was no MPS (no_mps)")


def _check_failures(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield replicas and groups that need at least as much, with at most the resources, of a recorded failed run."""
    for where, gpu in _list_gpus(deployment) if evidence.tried.failed else ():
        device = evidence.devices.get(gpu.device)
        if device is None:
            continue
        for partition in gpu.partitions:
            workloads = [  # as runs record them, without turns
                replace(replica_workload(partition, replica, replica.batch), turns=0) for replica in partition.replicas
            ]
            if (device.name, tuple(sorted(workloads))) in evidence.tried.together:
                continue
            for failed in evidence.tried.failed:
                pattern = [failed.workload, *failed.beside]
                if device.name != failed.device:
                    continue
                candidates = [
                    runs for runs in workloads if failed.beside or (device.name, runs) not in evidence.tried.measured
                ]
                if _contains(device, candidates, pattern, failed):
                    yield Violation("failed", where, str(failed))


def _contains(device: Device, workloads: Sequence[Workload], pattern: Sequence[Workload], failed: FailedRun) -> bool:
    """Return whether each failed workload has its own counterpart that needs as much with no more resources."""
    if not pattern:
        return True
    return any(
        _is_no_easier(device, runs, pattern[0], failed)
        and _contains(device, [*workloads[:number], *workloads[number + 1 :]], pattern[1:], failed)
        for number, runs in enumerate(workloads)
    )


def _is_no_easier(device: Device, runs: Workload, fault: Workload, failed: FailedRun) -> bool:
    if runs.model != fault.model or runs.batch < fault.batch or runs.processes < fault.processes:
        return False
    memory = {profile.name: profile.memory_bytes for profile in device.mig_profiles}
    if not {runs.share.mig, fault.share.mig} <= {None, *memory}:
        return False  # the geometry check reports it
    size, short = (device.dram_bytes if share.mig is None else memory[share.mig] for share in (runs.share, fault.share))
    compute, least = device.fraction(runs.share), device.fraction(fault.share)
    return size <= short and (failed.is_memory or compute <= least * (1.0 + ROUNDING))


def _check_rates(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    planned: defaultdict[str, float] = defaultdict(float)
    replicas: Counter[str] = Counter()
    for *_, replica in deployment.places():
        planned[replica.model] += replica.rate_rps
        replicas[replica.model] += 1
    missing: defaultdict[str, float] = defaultdict(float)
    for unplaced in deployment.unplaced:
        missing[unplaced.model] += unplaced.rate_rps
        if not unplaced.rate_rps > 0.0:
            yield Violation("rate", unplaced.model, "is listed as unplaced, but all of it is placed")
        if unplaced.model not in deployment.models:
            yield Violation("rate", unplaced.model, "is listed as unplaced but is not among the map's models")
    for name, deployed in deployment.models.items():
        if planned[name] + missing[name] > deployed.rate_rps * (1.0 + ROUNDING):
            unplaced_rps = f" and {missing[name]:g} unplaced" if missing[name] else ""
            total = f"replicas are planned for {planned[name]:g} requests/s{unplaced_rps}"
            yield Violation("rate", name, f"{total}, but {deployed.rate_rps:g} are demanded")
    for demand in _list_demands(deployment, evidence):
        served_rps = planned[demand.model] + (0.0 if evidence.demands is not None else missing[demand.model])
        if served_rps < demand.rate_rps * (1.0 - ROUNDING):
            yield Violation("rate", demand.model, f"{served_rps:g} of {demand.rate_rps:g} requests/s are served")
        if demand.max_replicas is not None and replicas[demand.model] > demand.max_replicas:
            yield Violation("rate", demand.model, f"{replicas[demand.model]} replicas of {demand.max_replicas} allowed")


def _check_chains(deployment: DeploymentMap) -> Iterator[Violation]:
    """Yield chains whose steps together may take longer, or miss their SLOs more often, than the chain allows."""
    for name, chain in deployment.chains.items():
        steps = [
            deployment.models[step] for step in chain.steps if step in deployment.models
        ]  # the rate check reports others
        sum_ms = math.fsum(step.slo_ms for step in steps)
        late_pct = math.fsum(100.0 - step.percentile for step in steps)
        if sum_ms > chain.slo_ms * (1.0 + ROUNDING):
            parts = " + ".join(f"{step.slo_ms:.4g}" for step in steps)
            yield Violation(
                "slo", name, f"the SLOs of its steps add up to {parts} ms, but the chain's is {chain.slo_ms:g} ms"
            )
        if late_pct > (100.0 - chain.percentile) * (1.0 + ROUNDING) + ROUNDING:
            yield Violation(
                "slo",
                name,
                f"its steps may be late for {late_pct:.4g}% of the requests, but {chain.percentile:g}% must be in time",
            )
        if len({step.rate_rps for step in steps}) > 1:
            rates = ", ".join(f"{step.rate_rps:g}" for step in steps)
            yield Violation("rate", name, f"its steps are planned for {rates} requests/s, but each gets every request")


def _list_demands(deployment: DeploymentMap, evidence: Evidence) -> Sequence[Demand]:
    if evidence.demands is not None:
        return evidence.demands
    return [
        Demand(name, model.rate_rps, Slo(model.slo_ms, model.percentile)) for name, model in deployment.models.items()
    ]


def _check_slos(deployment: DeploymentMap, locations: Sequence[Location], evidence: Evidence) -> Iterator[Violation]:
    """Yield demands and replicas whose latency under the map's queueing rule breaks the SLO."""
    demands = {demand.model: demand for demand in _list_demands(deployment, evidence)}
    serving = [location for location in locations if location.replica.model in demands]
    if evidence.latency_budget is not None:
        for location in serving:
            yield from _check_budget(location, demands, evidence)
        return
    counts = Counter(location.replica.model for location in serving)
    pools: defaultdict[str, list[tuple[Replica, BatchServer]]] = defaultdict(list)
    unknown: set[str] = set()
    for location, server in zip(serving, map_servers(serving, evidence), strict=True):
        replica = location.replica
        if isinstance(server, str):
            yield Violation("slo", location.where, server)
            unknown.add(replica.model)
        elif replica.rate_rps >= server.capacity_rps and counts[replica.model] == 1:
            yield Violation("rate", location.where, _describe_excess_rate(replica, server.capacity_rps))
            unknown.add(replica.model)
        else:
            pools[replica.model].append((replica, server))
    for name, members in sorted(pools.items()):  # the router sees all replicas of a model as one queue
        arrivals = Arrivals(math.fsum(replica.rate_rps for replica, _ in members))
        most_rps = math.fsum(server.capacity_rps for _, server in members)
        if name in unknown:
            continue
        if arrivals.rate_rps >= most_rps:
            detail = f"the replicas get {arrivals.rate_rps:.4g} requests/s but serve at most {most_rps:.4g}"
            yield Violation("rate", name, detail)
            continue
        sojourn = queue_of(evidence.queueing, name).pool(arrivals, [server for _, server in members]).whole
        yield from _check_percentile(demands[name], sojourn)


def _check_budget(location: Location, demands: dict[str, Demand], evidence: Evidence) -> Iterator[Violation]:
    """Check the papers' rule: a batch within its part of the SLO, the rate within the throughput.

    A batch of a worker is in time after the longest wait: for a full batch of each other model.
    """
    replica, where = location.replica, location.where
    mates = [r for r in location.partition.replicas if r is not replica and replica.turns and r.turns == replica.turns]
    try:
        latency, each_ms = _read_batch_ms(location, evidence)
        mates_ms = [_read_batch_ms(replace(location, replica=mate), evidence)[0] for mate in mates]
        waits_ms = find_cycle_ms(latency, mates_ms, replica.time_slice_ms) - latency
    except InputError as error:
        yield Violation("slo", where, str(error))
        return
    budget_ms = (evidence.latency_budget or 1.0) * demands[replica.model].slo.latency_ms
    if not 0.0 < latency + waits_ms < budget_ms * (1.0 + ROUNDING):
        text = f"a batch of {replica.model} takes {latency + waits_ms:.4g} ms of {budget_ms:.4g} ms"
        yield Violation("slo", where, f"{text}, waits for its turn included" if mates else text)
    throughput = 1000.0 * replica.batch * replica.processes / (each_ms + waits_ms) if each_ms > 0.0 else 0.0
    if replica.rate_rps > throughput * (1.0 + ROUNDING):
        yield Violation("rate", where, _describe_excess_rate(replica, throughput))


def _read_batch_ms(location: Location, evidence: Evidence) -> tuple[float, float]:
    """Return the time of a full batch, with and without the part that overlaps with another batch.

    Raises `InputError` where the estimator cannot answer.
    """
    partition, replica = location.partition, location.replica
    if evidence.estimator is None:
        return replica.predicted.latency_ms, replica.predicted.latency_ms - replica.predicted.overlapped_ms
    workload, beside = replica_workload(partition, replica, replica.batch), neighbour_workloads(partition, replica)
    estimate = ask_estimator(evidence.estimator, location.device, workload, beside)
    latency = upper_ms(estimate.latency_ms, evidence.confidence)
    return latency, latency - estimate.overlapped_ms


def _describe_excess_rate(replica: Replica, most_rps: float) -> str:
    return f"{replica.model} gets {replica.rate_rps:.4g} requests/s but serves at most {most_rps:.4g}"


def _check_percentile(demand: Demand, sojourn: Sojourn) -> Iterator[Violation]:
    fraction = sojourn.fraction_within(demand.slo.latency_ms * (1.0 + ROUNDING))
    if fraction < demand.slo.percentile / 100.0 - ROUNDING:
        yield Violation(
            "slo",
            demand.model,
            f"{100.0 * fraction:.4g}% of the requests are within {demand.slo.latency_ms:g} ms, "
            f"but {demand.slo.percentile:g}% must be",
        )


def _check_busy_time(locations: Sequence[Location], evidence: Evidence) -> Iterator[Violation]:
    """Yield partitions whose replicas need more than all of their SM time, under any estimator."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for location in locations:
        mig = location.partition.mig
        where = location.where if mig is None else f"{location.where} {mig.profile}@{mig.start}"
        seconds[where] += _needed_time(location, evidence)
    for where, part in seconds.items():
        if part > 1.0 + ROUNDING:
            yield Violation("time", where, f"the replicas ask for {100.0 * part:.3g}% of the device's time")


def _needed_time(location: Location, evidence: Evidence) -> float:
    """Return the part of a partition's SM time a replica needs at its rate.

    Within a share, the replica needs its share while a batch runs, and a model of a worker the worker's share. Without
    a share, or with an unmeasured smaller share that claims the speed of the whole partition (USHER's premise), it
    needs the time of a batch alone in the partition, times the part of the SMs the batch keeps active:
    ``wavg_sm_util`` where measured, else all of them.
    """
    partition, replica, device = location.partition, location.replica, location.device
    if len(partition.replicas) < 2:
        return 0.0  # bounded by the check of rates
    throughput_rps, share = replica.predicted.throughput_rps, replica.sm_share_pct / 100.0
    if evidence.estimator is not None:
        workload = replica_workload(partition, replica, replica.batch)
        full_share = replace(workload, share=replace(workload.share, sm_pct=100.0))
        try:
            estimate = ask_estimator(evidence.estimator, device, workload)
            full_estimate = ask_estimator(evidence.estimator, device, full_share)
        except InputError:
            return 0.0  # reported with the SLO
        throughput_rps = estimate.throughput_rps.value if replica.turns else throughput_rps
        if not replica.turns and (share == 1.0 or _is_claimed(estimate, full_estimate)):
            utilization = full_estimate.creq("wavg_sm_util")
            is_measured = utilization is not None and utilization.is_observed
            share = min(1.0, utilization.value / 100.0) if utilization is not None and is_measured else 1.0
            throughput_rps = full_estimate.throughput_rps.value
    return share * replica.rate_rps / throughput_rps if throughput_rps > 0.0 else 0.0


def _is_claimed(estimate: Estimate, full_estimate: Estimate) -> bool:
    """Return whether a measured requirement, not a measured time, says that a share slows no batch down."""
    return (
        classify_source(estimate.latency_ms.source) != MEASURED
        and is_rounded_to(estimate.latency_ms.value, full_estimate.latency_ms.value)
        and any(figure.is_observed for _, figure in estimate.creq_pct)
    )


def _check_figures(deployment: DeploymentMap, locations: Sequence[Location], evidence: Evidence) -> Iterator[Violation]:
    """Yield figures that would mislead the router, the simulator or a reader."""
    predicted = deployment.predicted
    used_gpus = [gpu for _, gpu in _list_gpus(deployment) if any(partition.replicas for partition in gpu.partitions)]
    if predicted.gpus != len(used_gpus):
        yield Violation("figures", "predicted", f"gpus says {predicted.gpus} and replicas run on {len(used_gpus)}")
    bound = predicted.lower_bound_gpus
    if bound is not None and bound > len(used_gpus) and not deployment.unplaced:
        yield Violation("figures", "predicted", f"the lower bound of {bound} GPUs is above the {len(used_gpus)} used")
    goodput = math.fsum(location.replica.predicted.goodput_rps for location in locations)
    if len(locations) == len(list(deployment.places())) and not is_rounded_to(predicted.goodput_rps, goodput):
        sums = f"{predicted.goodput_rps:.4g}/s in the map but {goodput:.4g}/s over its replicas"
        yield Violation("figures", "predicted", f"goodput is {sums}")
    prices = [evidence.devices[gpu.device].price_per_hour for gpu in used_gpus if gpu.device in evidence.devices]
    if predicted.cost_per_hour is not None and len(prices) == len(used_gpus):
        cost = None if None in prices else math.fsum(price for price in prices if price is not None)
        if cost is None or not is_rounded_to(predicted.cost_per_hour, cost):
            true = "a device has no price" if cost is None else f"its devices cost {cost:.4g} $/h"
            yield Violation("figures", "predicted", f"the cost is {predicted.cost_per_hour:.4g} $/h, but {true}")
    for location in locations:
        for message in _check_times(location, evidence):
            yield Violation("figures", location.where, f"{location.replica.model}: {message}")


def _check_times(location: Location, evidence: Evidence) -> Iterator[str]:
    """Yield times of a replica that differ from the estimator's, or contradict each other without an estimator."""
    replica = location.replica
    predicted, times = replica.predicted, replica.batch_latency_ms
    each_ms = predicted.latency_ms - predicted.overlapped_ms
    if not each_ms > 0.0:
        yield "no time is predicted for a batch"
    elif not is_rounded_to(predicted.throughput_rps, 1000.0 * replica.batch * replica.processes / each_ms):
        throughput = f"a throughput of {predicted.throughput_rps:.4g}/s"
        yield f"{throughput} does not follow from {each_ms:.4g} ms for a batch of {replica.batch}"
    if predicted.goodput_rps > replica.rate_rps * (1.0 + ROUNDING) + ROUNDING:
        yield f"a goodput of {predicted.goodput_rps:.4g}/s is more than the rate of {replica.rate_rps:.4g}/s"
    if times is not None and len(times) != replica.batch:
        yield f"batch_latency_ms must hold {replica.batch} times"
    elif times is not None and not is_rounded_to(times[-1], predicted.latency_ms + evidence.host.handover_ms):
        yield f"batch_latency_ms ends at {times[-1]:.4g} ms but a batch takes {predicted.latency_ms:.4g} ms"
    if evidence.estimator is None:
        return
    workload = replica_workload(location.partition, replica, replica.batch)
    beside = neighbour_workloads(location.partition, replica)
    try:
        full = ask_estimator(evidence.estimator, location.device, workload, beside)
        if not is_rounded_to(predicted.latency_ms, full.latency_ms.value):
            values = f"{predicted.latency_ms:.4g} in the map but {full.latency_ms.value:.4g}"
            yield f"latency_ms is {values} by the estimator"
        memory, needed = predicted.memory_bytes, _needed_bytes(location, evidence)
        if memory and needed and abs(memory - needed) > RELATIVE_ROUNDING * needed + replica.processes:
            yield f"it holds {_gib(memory)} in the map but {_gib(needed)} by the estimator"
        if times is None or len(times) != replica.batch or replica.batch > MOST_BATCH:
            return
        estimates = ask_batch_series(evidence.estimator, location.device, location.partition, replica)
    except InputError:
        return  # reported with the SLO
    for size, (value, estimate) in enumerate(zip(times, estimates, strict=True), 1):
        true = estimate.latency_ms.value + evidence.host.handover_ms
        if not is_rounded_to(value, true):
            yield f"batch_latency_ms of {size} is {value:.4g} ms in the map but {true:.4g} ms by the estimator"
            return


def check_work(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield each device whose replicas' requests need more than all of its time, by the estimator's work bounds."""
    if evidence.estimator is None:
        return
    for node in deployment.nodes:
        for gpu in (g for g in node.gpus if g.device in evidence.devices):
            work, slack = _add_work(gpu, evidence)
            if work > 1.0 + slack:
                detail = f"its replicas are given {work:.3g} seconds of the whole device's work a second"
                yield Violation("rate", f"{node.name} gpu {gpu.index}", detail)


def _add_work(gpu: Gpu, evidence: Evidence) -> tuple[float, float]:
    """Return a device's work in seconds per second, and the tolerance; unknown work is excluded."""
    assert evidence.estimator is not None
    seconds, slack = [], RELATIVE_ROUNDING
    for partition in gpu.partitions:
        for replica in partition.replicas:
            work = board_work(evidence.estimator, replica.model, evidence.devices[gpu.device])
            if work is not None:
                seconds.append(replica.rate_rps * upper_ms(work, evidence.confidence) / 1e3)
                slack = _BEYOND_MEASURED if work.source == MEASURED else slack
    return math.fsum(seconds), slack
