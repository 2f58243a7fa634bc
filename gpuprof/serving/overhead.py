"""Measures what serving itself adds to a request on this machine: client, network, router and worker, no model.

The server of this package runs null models, which answer at once, in a process of its own; a client sends requests of
two sizes, few enough that none waits for another. A straight line through the two medians is the overhead of any size.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpuprof.errors import UnavailableError

_SMALL_BYTES = 4
_LARGE_BYTES = 1_000_000
_RATE_RPS = 60.0
_DURATION_S = 1.5
_WARMUP_S = 0.3
_START_S = 30.0
_MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class RequestOverhead:
    """Time that serving adds to a request, without any queue.

    Attributes
    ----------
    fixed_ms : float
        Of a request without content.
    ms_per_mib : float
        More for each MiB of tensors that it brings.
    """

    fixed_ms: float
    ms_per_mib: float

    def of(self, request_bytes: float) -> float:
        """Return the overhead in ms of a request with ``request_bytes`` of tensors."""
        return self.fixed_ms + self.ms_per_mib * request_bytes / _MIB


def measure_overhead(device: str) -> RequestOverhead:
    """Measure for about four seconds.

    Parameters
    ----------
    device : str
        Name of this machine's CPU, on which the null models are served.

    Raises
    ------
    UnavailableError
        When the server does not start here.
    """
    small, large = _median_ms(device, _SMALL_BYTES), _median_ms(device, _LARGE_BYTES)
    # The null model sends back what it got; networks answer with little, so half of what the size costs is theirs.
    per_byte = max(0.0, large - small) / (_LARGE_BYTES - _SMALL_BYTES) / 2.0
    return RequestOverhead(small, per_byte * _MIB)


def _median_ms(device: str, size: int) -> float:
    from gpuprof.serving.load import LoadSettings, Stream, run_load
    from gpuprof.serving.load_target import Target

    with _server(device, size) as url:
        settings = LoadSettings(_DURATION_S, _WARMUP_S, arrivals="constant", clients=1)
        (result,) = run_load(Target.parse(url), [Stream("null", _RATE_RPS, 1000.0)], settings).results
    if result.p50_ms is None:
        raise UnavailableError("the server that measures the overhead of serving did not answer")
    return result.p50_ms


@contextmanager
def _server(device: str, size: int) -> Iterator[str]:
    """Run a server of one null model in a process of its own; yield its address."""
    command = [sys.executable, "-m", "gpuprof.serving.null_server", device, str(size)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _START_S)
        url = process.stdout.readline().strip() if ready else ""
        if not url:
            raise UnavailableError("the server that measures the overhead of serving did not start")
        yield url
    finally:
        process.terminate()
        process.communicate()
