"""Measures the overhead of serving for a request on this machine: client, network, router and worker, no model.

The server of this package runs null models, which answer at once, in a child process; a client sends requests of two
sizes, few enough to avoid queueing. A straight line through the two medians gives the overhead of any size. CPU time
is measured as well: of the worker, which cannot run a batch meanwhile, and of router, machine process and client,
which delay all other work on their core.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_file import parse_map
from gpuprof.errors import UnavailableError
from gpuprof.rules.host_work import BUSY_RPS, CALM_RPS

_SMALL_BYTES, _LARGE_BYTES = 4, 1_000_000
_WARMUP_S, _DURATION_S = 0.3, 1.0
_REPEATS = 3
_MIB = float(1 << 20)
_WORKER = b"gpuprof.serving.worker.worker"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class RequestOverhead:
    """Additional time of a request through serving, without any queue."""

    fixed_ms: float  #: Latency of a request without content.
    ms_per_mib: float  #: Additional latency for each MiB of input tensors.
    handover_ms: float = 0.0  #: Part of ``fixed_ms`` for which the worker cannot run other batches.
    #: ``host_ms``, ``host_ms_per_mib``: CPU time of router, machine process and client for a request, and the addition
    #: for each MiB of its tensors.
    host_ms: float = 0.0
    host_ms_per_mib: float = 0.0
    host_ms_busy: float = 0.0  #: The former where many requests come a second.

    def of(self, request_bytes: float) -> float:
        """Return the overhead in ms of a request with ``request_bytes`` of tensors."""
        return self.fixed_ms + self.ms_per_mib * request_bytes / _MIB


@dataclass(frozen=True, slots=True)
class OverheadSample:
    """Median latency and CPU time by process of a request of one size, in ms."""

    median_ms: float
    worker_ms: float
    host_ms: float


def measure_overhead(device: str) -> RequestOverhead:
    """Measure for about ten seconds; the fastest of several repeats counts, since other load only adds time.

    ``device``: name of this machine's CPU, on which the null models are served. Raises `UnavailableError` when the
    server does not start here.
    """
    small, large = _measure_size(device, _SMALL_BYTES), _measure_size(device, _LARGE_BYTES)
    busy = _measure_size(device, _SMALL_BYTES, BUSY_RPS)
    return RequestOverhead(
        small.median_ms,
        _per_mib(small.median_ms, large.median_ms),
        min(small.worker_ms, small.median_ms),
        small.host_ms,
        _per_mib(small.host_ms, large.host_ms),
        min(busy.host_ms, small.host_ms),
    )


def _per_mib(small: float, large: float) -> float:
    """Return the cost of another MiB, halved: the null model returns its input, whereas networks have small outputs."""
    return max(0.0, large - small) / (_LARGE_BYTES - _SMALL_BYTES) / 2.0 * _MIB


def _measure_size(device: str, size: int, rate_rps: float = CALM_RPS) -> OverheadSample:
    from gpuprof.pipeline.serve import serve
    from gpuprof.pipeline.serve_settings import ServeSettings

    with serve(_make_null_map(device, size), ServeSettings(port=0)) as server:
        samples = [_send_requests(server.url, server.pid, rate_rps) for _ in range(_REPEATS)]
    return min(samples, key=lambda sample: sample.median_ms)


def _make_null_map(device: str, size: int) -> DeploymentMap:
    """Return a map with a single null model of ``size`` bytes on all of ``device``."""
    predicted = {"latency_ms": 0.0, "throughput_rps": 1e6, "goodput_rps": BUSY_RPS}
    replica = {"model": "null", "batch": 1, "rate_rps": BUSY_RPS, "predicted": predicted}
    document = {
        "schema": "gpuprof.deployment/1",
        "policy": "none",
        "models": {"null": {"path": f"null:{size}", "rate_rps": BUSY_RPS, "slo_ms": 1000.0}},
        "nodes": [{"name": "here", "gpus": [{"index": 0, "device": device, "partitions": [{"replicas": [replica]}]}]}],
        "predicted": {"gpus": 1, "goodput_rps": BUSY_RPS},
    }
    return parse_map(document, "the map of a null model")


def _send_requests(url: str, pid: int, rate_rps: float) -> OverheadSample:
    """Send requests to the server ``pid``."""
    from gpuprof.load.load import LoadSettings, RequestStream, run_load
    from gpuprof.load.target import Target

    settings = LoadSettings(_DURATION_S, _WARMUP_S, arrivals="constant", clients=1)
    before = _read_cpu_ms(pid)
    outcome = run_load(Target.parse(url), [RequestStream("null", rate_rps, 1000.0)], settings)
    worker_ms, others_ms = (after - then for after, then in zip(_read_cpu_ms(pid), before, strict=True))
    (result,) = outcome.results
    if result.p50_ms is None:
        raise UnavailableError("the server that measures the overhead of serving did not answer")
    requests = rate_rps * (_WARMUP_S + _DURATION_S)
    # 0 without CPU times from the system: the client's time alone would be too little.
    host_ms = others_ms and others_ms + 1000.0 * outcome.client_cpu_s
    return OverheadSample(result.p50_ms, worker_ms / requests, host_ms / requests)


def _read_cpu_ms(pid: int) -> tuple[float, float]:
    """Return the CPU time so far of a server's workers and of all its other processes; 0 where unavailable."""
    worker_ms = others_ms = 0.0
    for process in _list_process_tree(pid):
        with suppress(OSError):  # the process has ended meanwhile
            # schedstat rather than stat, whose ticks of 10 ms are longer than a request.
            threads = [path.read_text() for path in _PROC.glob(f"{process}/task/*/schedstat")]
            spent_ms = sum(int(text.split()[0]) for text in threads) / 1e6
            if _WORKER in (_PROC / str(process) / "cmdline").read_bytes().split(b"\0"):
                worker_ms += spent_ms
            else:
                others_ms += spent_ms
    return worker_ms, others_ms


def _list_process_tree(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for thread in _PROC.glob(f"{pid}/task/*/children"):
        with suppress(OSError):  # the process has ended meanwhile
            for child in thread.read_text().split():
                yield from _list_process_tree(int(child))
