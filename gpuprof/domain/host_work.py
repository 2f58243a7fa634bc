"""The cost of serving besides the batches: CPU time of router, machine process and clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

from pydantic import Field

from gpuprof.domain.validation import check_fields

#: Requests per second at which the cost is measured: with hardly any concurrent host work, and with much.
CALM_RPS, BUSY_RPS = 60.0, 600.0
_Milliseconds: TypeAlias = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]


@check_fields
@dataclass(frozen=True, slots=True)
class HostWork:
    """The cost of serving, measured by ``gpuprof profile`` and assumed by plans."""

    #: Worker time of each batch besides the model's: receiving the batch and sending the answer.
    handover_ms: _Milliseconds = 0.0
    #: CPU time per request of router, machine process and clients on the same machine, at `CALM_RPS`.
    host_ms: _Milliseconds = 0.0
    #: Cores of the machine; 0: the workers' device is not the CPU of these processes, or the number is unknown.
    host_cores: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    #: CPU time per request at `BUSY_RPS`: less, since a running process handles several arrivals at once. 0: unknown.
    host_ms_busy: _Milliseconds = 0.0

    def at(self, rate_rps: float) -> HostWork:
        """Return the cost at a request rate, interpolated in the logarithm of the rate between the measured rates."""
        # Not measured under load, or not lower there: the same figure at every rate.
        if not 0.0 < self.host_ms_busy < self.host_ms:
            return replace(self, host_ms_busy=0.0)
        # Constant beyond the two rates: nothing was measured there, and extrapolation would go below zero.
        part = math.log(min(max(rate_rps, CALM_RPS), BUSY_RPS) / CALM_RPS) / math.log(BUSY_RPS / CALM_RPS)
        return replace(self, host_ms=(1.0 - part) * self.host_ms + part * self.host_ms_busy, host_ms_busy=0.0)

    @property
    def event_ms(self) -> float:
        """CPU time in ms at the arrival of a request; the same time is spent at its answer."""
        return self.host_ms / 2.0

    @property
    def can_disturb(self) -> bool:
        """Whether host work can delay batches."""
        return self.host_cores > 0 and self.host_ms > 0.0


#: No host work: unmeasured, or batches run on a GPU.
NO_HOST_WORK = HostWork()
