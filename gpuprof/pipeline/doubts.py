"""When an estimate is too uncertain for ``--strict``."""

from __future__ import annotations

from gpuprof.domain.estimate import Estimate
from gpuprof.domain.sizes import split_name
from gpuprof.errors import InputError

#: A 90% interval of a latency that exceeds this multiple of the value is wide.
WIDE = 2.0
_FIX = "profile it there, or leave out --strict"


def require_sure(estimate: Estimate) -> None:
    """Raise `InputError` for an estimate with unknown ops or a wide interval, with the device."""
    name, _ = split_name(estimate.workload.model)
    if estimate.unknown_ops:
        unknown = ", ".join(estimate.unknown_ops)
        raise InputError(f"{name}: nothing is known of {unknown} on {estimate.device}", _FIX)
    latency = estimate.latency_ms
    if latency.value > 0.0 and latency.upper() > WIDE * latency.value:
        low = 0.0 if latency.low is None else latency.low
        raise InputError(
            f"{name} on {estimate.device} at batch {estimate.workload.batch} is estimated at {latency.value:.3g} ms, "
            f"but may take {low:.3g} to {latency.upper():.3g} ({latency.source}): more than {WIDE:g} times as long",
            _FIX,
        )
