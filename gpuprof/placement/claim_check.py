"""Checks a map's provenance: policy, time, estimator, model files and devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from gpuprof.domain.deployment import DeploymentMap, read_creation_time
from gpuprof.errors import InputError
from gpuprof.placement.evidence import Violation

_CLOCKS_APART = timedelta(days=1)  # two machines' at most, and zones that were left out
_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC) - _CLOCKS_APART
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CREQ_METRICS = ("max_occupancy", "wavg_occupancy", "wavg_sm_util")
_RELATIVE = 1e-3


def check_claims(deployment: DeploymentMap) -> Iterator[Violation]:
    """Yield what cannot be so, whatever the map holds."""
    settings = deployment.planned_with
    named = {"policy": deployment.policy, "estimator": settings.estimator}
    for name, text in (named | {"found_by": settings.found_by, "stopped_by": settings.stopped_by}).items():
        if text is not None and not text.strip():
            yield Violation("figures", name, "has no name")
    if deployment.created is not None:
        yield from _check_creation(deployment.created)
    for name, sha256 in (("slo_sha256", settings.slo_sha256), ("database_sha256", settings.database_sha256)):
        if sha256 is not None and not _SHA256.fullmatch(sha256):
            yield Violation("figures", name, f"{sha256!r} is no SHA-256")
    paths = [(name, model.path) for name, model in deployment.models.items()]
    for name, path in (*paths, *((name, merge.path) for name, merge in deployment.merges.items())):
        if path is not None and not path.strip():
            yield Violation("figures", name, "its file has no path")
    if settings.latency_budget is not None:
        yield from _check_percentiles(deployment)
    yield from _check_devices(deployment)
    yield from _check_required_compute(deployment)


def _check_creation(created: str) -> Iterator[Violation]:
    try:
        when = read_creation_time(created)
    except InputError as error:
        yield Violation("figures", "created", str(error))
        return
    if when > datetime.now(UTC) + _CLOCKS_APART:
        yield Violation("figures", "created", f"{created} is yet to come")
    if when < _BEGINNING:
        yield Violation("figures", "created", f"{created} is before any clock of a computer")


def _check_percentiles(deployment: DeploymentMap) -> Iterator[Violation]:
    """Yield percentiles of maps whose batches keep to a part of the SLO: of queues such plans know nothing."""
    said = [(replica.model, replica.predicted) for *_, replica in deployment.places()]
    for name, one in (*said, *((name, model.predicted) for name, model in deployment.models.items())):
        if one is not None and any(value is not None for value in (one.p50_ms, one.p95_ms, one.p99_ms)):
            yield Violation("figures", name, "has percentiles, and the map was planned without queues")


def _check_devices(deployment: DeploymentMap) -> Iterator[Violation]:
    """Yield devices in use that the map was not planned on, or on fewer of them."""
    planned = {one.device: one.count for one in deployment.planned_with.fleet}
    used = Counter(gpu.device for node in deployment.nodes for gpu in node.gpus)
    for name, count in used.items() if planned else ():
        if name not in planned:
            yield Violation("fleet", name, f"is used, and the map was planned on {', '.join(sorted(planned))}")
        elif (there := planned[name]) is not None and count > there:
            yield Violation("fleet", name, f"{count} devices are used and the map was planned on {there}")


def _check_required_compute(deployment: DeploymentMap) -> Iterator[Violation]:
    for node, gpu, _, replica in deployment.places():
        creq, where = replica.predicted.creq, f"{node.name} gpu {gpu.index}"
        if creq is None:
            continue
        if creq.metric not in _CREQ_METRICS:
            yield Violation("figures", where, f"{replica.model}: {creq.metric!r} is no metric of compute requirements")
        if not creq.source.strip():
            yield Violation("figures", where, f"{replica.model}: its compute requirement has no source")
        low, high = creq.interval_pct or (creq.pct, creq.pct)
        if max(creq.pct, high) > 100.0 * (1.0 + _RELATIVE):
            said = f"a requirement of {max(creq.pct, high):.4g}% is more than a device"
            yield Violation("figures", where, f"{replica.model}: {said}")
        if low < 0.0:
            yield Violation("figures", where, f"{replica.model}: a requirement of {low:.4g}% is less than nothing")
