"""Which requests are simulated, how they are served, how the map follows them, and how exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.domain.argument_types import NotNegative, Positive, Seed, check_fields
from gpuprof.errors import InputError, unknown_name
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.result import NoteCallback, say_nothing

if TYPE_CHECKING:
    from gpuprof.domain.arrival_process import ArrivalProcess
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.simulator.cluster import SimulationOptions
    from gpuprof.simulator.merged_queues import MergedQueues
    from gpuprof.simulator.network import NetworkDelay

#: A trace ends with its last request, which is to be simulated too.
_AFTER_THE_LAST_S = 1e-6
_DURATION_S = 60.0


@dataclass(frozen=True, slots=True)
class SimulatedArrivals:
    """How the requests of each model arrive."""

    processes: Mapping[str, ArrivalProcess]
    trace_s: float | None = None  #: How long a trace lasts, with its last request; None without one.


@check_fields
@dataclass(frozen=True, slots=True)
class SimulatedTraffic:
    """Which requests come, and when.

    Attributes
    ----------
    trace : path or None
        Replay this CSV of ``time_s,model``; the rates say nothing then.
    rates_rps : mapping of str to float
        Requests per second of some models, instead of the map's.
    total_rps : float or None
        Requests per second of all models together, divided as the rates are.
    rate_scale : float
        Times the rates.
    arrivals : str
        ``"constant"``, ``"poisson"``, ``"gamma:SCV"``, ``"bursts:RATIO,BURST,CALM"``, ``"diurnal:PEAK,PERIOD"``: as
        `gpuprof.domain.arrival_text.parse_arrivals` reads it.
    duration_s : float or None
        How long requests arrive; None: as long as the trace, or 60 s.
    warmup_s : float
        Requests that arrive before this do not count.
    seed : int
    """

    trace: PathArgument | None = None
    rates_rps: Mapping[str, NotNegative] = field(default_factory=dict)
    total_rps: Positive | None = None
    rate_scale: Positive = 1.0
    arrivals: str = "poisson"
    duration_s: Positive | None = None
    warmup_s: NotNegative = 0.0
    seed: Seed = 0

    def read_arrivals(
        self, original: DeploymentMap, queues: MergedQueues, note: NoteCallback = say_nothing
    ) -> SimulatedArrivals:
        """Return how each queue's requests arrive.

        Raises
        ------
        InputError
            When a rate is of a model that the map lacks, the trace cannot be read, or both are given.
        """
        from gpuprof.simulator.load import arrivals_of_rates, arrivals_of_trace
        from gpuprof.simulator.trace import read_trace

        if self.trace is None:
            if unknown := [name for name in self.rates_rps if name not in original.models]:
                raise unknown_name("model", unknown[0], list(original.models))
            rates = queues.rates(original, self.rates_rps)
            return SimulatedArrivals(
                arrivals_of_rates(queues.deployment, rates, self.total_rps, self.rate_scale, self.arrivals)
            )
        if self.rates_rps or self.total_rps is not None or self.rate_scale != 1.0:
            raise InputError("--trace says when requests come: --rate and --rate-scale cannot change that")
        trace = read_trace(Path(self.trace))
        gap = trace.longest_gap_s()
        if gap > max(60.0, 0.1 * trace.duration_s):
            note(f"the trace has a gap of {gap:.3g} s without any request")
        processes = arrivals_of_trace(queues.deployment, queues.trace(trace))
        return SimulatedArrivals(processes, trace.duration_s + _AFTER_THE_LAST_S)

    def resolve_duration_s(self, trace_s: float | None) -> float:
        """Return how long requests arrive, in seconds.

        Raises
        ------
        InputError
            When nothing would be left to count.
        """
        seconds = self.duration_s or trace_s or _DURATION_S
        if self.warmup_s >= seconds:
            raise InputError(f"--warmup must be shorter than the duration of {seconds:g} s but got {self.warmup_s:g} s")
        return seconds


@check_fields
@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How requests are routed, batched, refused and delayed, and what fails meanwhile.

    Attributes
    ----------
    routing : str
        Choice among replicas: ``"fastest"`` or ``"round-robin"``.
    refuse : bool
        Refuse what cannot be answered in time, as the server does.
    batch_timeout_ms : float or None
        Batching delay of every batch, whatever its SLO; None: as the map says.
    router_ms : float
        Time of the router for a request.
    overhead_ms, host_ms : float or None
        Time of a request outside router and replica, and CPU time of router and clients for it; None: the map's own.
    network : str or path
        ``"none"``, ``"thesis"``, or a CSV of ``payload_bytes,latency_ms`` to fit.
    payload_bytes, answer_bytes : float
        Sizes of a request and of an answer on the network.
    failures : sequence of str
        ``"node0@30s"``, ``"node0/1@30s"`` or ``"node0/1@30s+10s"``.
    """

    routing: str = "fastest"
    refuse: bool = True
    batch_timeout_ms: NotNegative | None = None
    router_ms: NotNegative = 0.0
    overhead_ms: NotNegative | None = None
    host_ms: NotNegative | None = None
    network: PathArgument = "none"
    # An image of 3 × 224 × 224 in float32, and the scores of 1000 classes.
    payload_bytes: NotNegative = 602112.0
    answer_bytes: NotNegative = 4000.0
    failures: Sequence[str] = ()

    def simulation_options(
        self, deployment: DeploymentMap, traffic: SimulatedTraffic, arrivals: SimulatedArrivals
    ) -> SimulationOptions:
        """Return the simulator's options; what is not given is the map's own, at the rate of ``arrivals``.

        Raises
        ------
        InputError
            When a network or a failure cannot be read.
        """
        from gpuprof.rules.host_work import host_work_of_plan
        from gpuprof.simulator.cluster import SimulationOptions
        from gpuprof.simulator.failures import parse_failure
        from gpuprof.simulator.sampling import expected_requests

        seconds = traffic.resolve_duration_s(arrivals.trace_s)
        settings = deployment.planned_with
        outside_ms = settings.overhead_ms if self.overhead_ms is None else self.overhead_ms
        host = host_work_of_plan(settings)
        host = host if self.host_ms is None else replace(host, host_ms=self.host_ms, host_ms_busy=0.0)
        to_ms, back_ms = (_find_network(self.network).ms(size) for size in (self.payload_bytes, self.answer_bytes))
        return SimulationOptions(
            seconds,
            traffic.warmup_s,
            traffic.seed,
            self.routing,
            self.refuse,
            self.router_ms,
            dict.fromkeys(deployment.models, (outside_ms + to_ms, back_ms)),
            tuple(parse_failure(text, deployment) for text in self.failures),
            batch_timeout_ms=self.batch_timeout_ms,
            host=host.at(expected_requests(arrivals.processes, seconds) / seconds),
        )


@check_fields
@dataclass(frozen=True, slots=True)
class Rescheduling:
    """How the map follows the load.

    Attributes
    ----------
    period_s : float
        Period after which models are placed again for the observed rates.
    policies : sequence of str
        Which policy decides; none: the map's own. Several are compared on the same load.
    headroom : float
        Times the rates that are seen.
    load_s, mig_s : float
        Time of a model into a new replica, and of giving a GPU another MIG layout.
    """

    period_s: Positive
    policies: Sequence[str] = ()
    headroom: Positive = 1.2
    load_s: NotNegative = 5.0
    mig_s: NotNegative = 10.0


@check_fields
@dataclass(frozen=True, slots=True)
class Fidelity:
    """What is simulated exactly, and what is approximated.

    Attributes
    ----------
    interference : bool
        Slow batches by what really runs beside them, not by all neighbours.
    sample : int or None
        Replicas of a model in an approximation; 0: never approximate; None: where all would take minutes.
    """

    interference: bool = False
    sample: int | None = None


def _find_network(given: PathArgument) -> NetworkDelay:
    from gpuprof.simulator.network import LOCAL, THESIS, read_measurements

    return {"none": LOCAL, "thesis": THESIS}.get(str(given)) or read_measurements(Path(given))
