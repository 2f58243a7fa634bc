"""``simulate``: goodput and latency of a map, without a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpuprof.domain.arrival_process import ArrivalProcess
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.map_sources import describe_basis, record_basis
from gpuprof.domain.validation import NotNegative, Positive, Seed
from gpuprof.errors import GpuprofError, InfeasibleError, InputError
from gpuprof.pipeline.arguments import MapArgument, PathArgument, locate_files, map_folder, optional_path, resolve_map
from gpuprof.pipeline.problem import plan_map
from gpuprof.pipeline.recorded_problem import restore_policy, restore_problem, time_map_by
from gpuprof.pipeline.result import NoteCallback, NoteList, Progress, ProgressCallback, say_nothing
from gpuprof.pipeline.settings import ARRIVALS, Names, Rates, Settings, option
from gpuprof.pipeline.verdicts import JudgedResult, SloVerdict
from gpuprof.placement.policies import make_policy
from gpuprof.serving.change.window import HEADROOM
from gpuprof.simulator.cluster import SimulationOptions, parse_failure
from gpuprof.simulator.engine import simulate as simulate_all
from gpuprof.simulator.outcome import ModelOutcome, SimulationOutcome
from gpuprof.simulator.reschedule import (
    Autoscaling,
    MoveCosts,
    Scheduler,
    Timetable,
    make_timetable,
    observed_rates,
    summarize_autoscaling,
)
from gpuprof.simulator.trace import arrivals_of_rates, arrivals_of_trace, expected_requests, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable


#: The causes of `ModelOutcome.missed` in words.
_CAUSES = {
    "network": "by time on the network",
    "batching": "while they waited for others of their batch",
    "queue": "while they waited for a free worker",
    "service": "by the time of their batch",
    "refused": "refused, since they could not be in time",
    "full": "refused, since the queue was full",
    "failed": "lost to a failure",
}


class SimulatedTraffic(Settings):
    """Requests and their arrival times.

    With a ``trace`` the rates say nothing; ``duration_s`` is by default that of the trace, or 60 s.
    """

    title: ClassVar[str] = "Traffic"

    trace: Path | None = option(None, "Trace to replay: a CSV file of time_s,model.")
    rates_rps: Rates = option(
        {}, "Rate as MODEL=REQUESTS_PER_S, or one rate for all; default: the map's.", "--rate", repeated=True
    )
    rate_scale: Positive = option(1.0, "Factor on all rates.")
    arrivals: str = option("poisson", ARRIVALS)
    duration_s: Positive = option(
        60.0, "Time in which requests arrive: 60s, 5m, 1d; default with a trace: its own.", "--duration", unit="s"
    )
    seed: Seed = option(0, "Seed of the simulation.")

    def read_arrivals(
        self, deployment: DeploymentMap, note: NoteCallback = say_nothing
    ) -> tuple[Mapping[str, ArrivalProcess], float]:
        """Return the arrival process of each model of a map, and the seconds for which requests arrive.

        Raises `InputError` when a rate is of a model that the map lacks, the trace cannot be read, or both are given.
        """
        if self.trace is None:
            return arrivals_of_rates(deployment, self.rates_rps, self.rate_scale, self.arrivals), self.duration_s
        if self.rates_rps or self.rate_scale != 1.0:
            raise InputError("--trace says when requests come: --rate and --rate-scale cannot change that")
        trace = read_trace(Path(self.trace))
        gap = trace.longest_gap_s()
        if gap > max(60.0, 0.1 * trace.duration_s):
            note(f"the trace has a gap of {gap:.3g} s without any request")
        seconds = self.duration_s if "duration_s" in self.model_fields_set else trace.span_s
        return arrivals_of_trace(deployment, trace), seconds


class ServiceSettings(Settings):
    """Failures and host work."""

    title: ClassVar[str] = "Service and failures"

    host_ms: NotNegative | None = option(
        None, "CPU time in ms of router and clients for a request; default: the map's.", unit="ms"
    )
    failures: tuple[str, ...] = option(
        (),
        "Failure of a node or GPU: node0@30s, node0/1@30s or node0/1@30s+10s; may be repeated.",
        "--fail",
        repeated=True,
    )

    def simulation_options(
        self, deployment: DeploymentMap, arrivals: Mapping[str, ArrivalProcess], seconds: float, seed: int
    ) -> SimulationOptions:
        """Return the simulator's options, by default those of the map; host work is that at the rates of ``arrivals``.

        Raises `InputError` when a failure cannot be read.
        """
        settings = deployment.planned_with
        host = settings.host
        host = host if self.host_ms is None else replace(host, host_ms=self.host_ms, host_ms_busy=0.0)
        return SimulationOptions(
            seconds,
            seed=seed,
            legs_ms=dict.fromkeys(deployment.models, (settings.overhead_ms, 0.0)),
            failures=tuple(parse_failure(text, deployment) for text in self.failures),
            host=host.at(expected_requests(arrivals, seconds) / seconds),
        )


class Rescheduling(Settings):
    """Rescheduling of the map for the observed rates; several ``policies`` are compared on the same load."""

    title: ClassVar[str] = "Rescheduling"

    period_s: Positive = option(
        60.0,
        "Period after which a new map is planned for the observed rates: 60s; default: never.",
        "--reschedule",
        unit="s",
        unset=True,
    )
    policies: Names = option(
        (),
        "Policy of --reschedule; several, separated by commas, are compared; default: the map's.",
        "--policy",
        values="policies",
    )


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """A simulation, and how the map followed the load."""

    policy: str | None  #: None: the map's own.
    timetable: Timetable | None  #: None: the map stayed.
    outcome: SimulationOutcome


@dataclass(frozen=True, kw_only=True)
class SimulateResult(JudgedResult):
    """The result of a simulation, as clients see it.

    Attributes
    ----------
    runs : tuple of ScheduledRun
        A single run, or a run for each compared policy.
    basis : mapping
        Sources of the map's times, as `gpuprof.domain.map_sources.record_basis` returns them.
    """

    verb: ClassVar[str] = "simulate"
    runs: tuple[ScheduledRun, ...]
    basis: Mapping[str, object]

    @property
    def outcome(self) -> SimulationOutcome:
        """The simulation's outcome; with several policies, the outcome of the first."""
        return self.runs[0].outcome

    @property
    def is_comparison(self) -> bool:
        """Whether several policies were simulated."""
        return len(self.runs) > 1

    def comparison(self) -> tuple[Autoscaling, ...]:
        """Return the cost and benefit of rescheduling for each policy; empty without rescheduling."""
        return tuple(
            summarize_autoscaling(str(run.policy), run.timetable, run.outcome)
            for run in self.runs
            if run.timetable is not None
        )

    def verdicts(self) -> tuple[SloVerdict, ...]:
        """Return the verdict on each model's SLO, with the most frequent cause of missed requests."""
        return tuple(
            SloVerdict(
                model.model,
                model.slo_met,
                model.slo_ms,
                model.percentile,
                model.in_time_pct,
                model.p99_ms,
                None,
                model.rate_rps,
                model.goodput_rps,
                _explain_misses(model),
            )
            for model in self.outcome.clients
        )

    def require_kept(self) -> None:
        """Check that every model kept its SLO; several compared policies are not judged.

        Raises `SloMissedError` when a model missed its SLO.
        """
        if not self.is_comparison:
            super().require_kept()

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each model, or of a comparison for each policy."""
        if self.is_comparison:
            return [{**asdict(row), "basis": self.basis["text"]} for row in self.comparison()]
        return [asdict(model) for model in self.outcome.clients]

    def document(self) -> dict[str, object]:
        """Return everything as plain values for JSON; of a comparison, by policy."""
        if self.is_comparison:
            return {str(run.policy): self._document(run) for run in self.runs}
        return self._document(self.runs[0])

    def _document(self, run: ScheduledRun) -> dict[str, object]:
        document = run.outcome.document() | {"basis": dict(self.basis)}
        if run.timetable is not None:
            document["rescheduling"] = asdict(summarize_autoscaling(str(run.policy), run.timetable, run.outcome))
        return document


def _explain_misses(model: ModelOutcome) -> str:
    """Return the most frequent cause of requests outside a missed SLO; empty otherwise."""
    if model.slo_met is not False:
        return ""
    cause, count = max(model.missed.items(), key=lambda item: item[1])
    late = sum(model.missed.values())
    return f"{late:,} of {model.requests:,} requests missed it, {count:,} of them {_CAUSES[cause]}"


def simulate(
    deployment: MapArgument = Path("map.json"),
    traffic: SimulatedTraffic = SimulatedTraffic(),  # noqa: B008 - frozen
    *,
    service: ServiceSettings = ServiceSettings(),  # noqa: B008 - frozen
    rescheduling: Rescheduling | None = None,
    db: PathArgument | None = None,
    estimator: str | Estimator | None = None,
    progress: ProgressCallback = say_nothing,
    note: NoteCallback = say_nothing,
) -> SimulateResult:
    """Replay requests against a map: goodput, percentiles, latency by stage, utilisation, and why SLOs were missed.

    Raises `InputError` for a wrong or unknown file, model, network, failure or policy, and for options that exclude
    each other.

    Parameters
    ----------
    traffic : SimulatedTraffic
        By default the map's rates for 60 s.
    rescheduling : Rescheduling, optional
        Rules for changing the map with the load; by default the map does not change.
    db : path, optional
        Kernel database, for rescheduling and another estimator.
    estimator : str or Estimator, optional
        Estimator of batch times; by default the times of the map.

    Examples
    --------
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(20.0))
    >>> plan = gpuprof.place([demand], fleet="a100-40")
    >>> seen = gpuprof.simulate(plan.deployment, gpuprof.SimulatedTraffic(duration_s=5.0, seed=1))
    >>> seen.to_frame()[["model", "in_time_pct"]].to_dict("records")
    [{'model': 'mlp', 'in_time_pct': 100.0}]
    """
    notes, original = NoteList(note), locate_files(resolve_map(deployment), map_folder(deployment))
    path = optional_path(db)
    original = time_map_by(original, estimator, path, map_folder(deployment), notes.add)
    policies = () if rescheduling is None else rescheduling.policies
    if len(set(policies)) < len(policies):
        raise InputError(f"--policy names a policy twice: {','.join(policies)}")
    for name in policies:
        make_policy(name, {})  # refuse an unknown name before the first simulation
    if merged := [name for name, model in original.models.items() if model.members]:
        notes.add(f"merged models are simulated as one, held to their tightest SLO: {', '.join(merged)}")
    arrivals, seconds = traffic.read_arrivals(original, notes.add)
    if original.chains and rescheduling is not None:
        raise InputError("--reschedule cannot follow requests through a chain", "leave it out")
    options = service.simulation_options(original, arrivals, seconds, traffic.seed)

    def tell(fraction: float) -> None:
        progress(Progress("simulating", round(100 * fraction), 100))

    if rescheduling is None:
        outcome = simulate_all(original, arrivals, options, tell)
        runs: tuple[ScheduledRun, ...] = (ScheduledRun(None, None, outcome),)
    else:
        runs = tuple(
            follow_load(original, arrivals, options, rescheduling.period_s, name, path, tell, notes.add)
            for name in policies or (None,)
        )
    notes.add(*filter(None, [describe_basis(original)]))
    return SimulateResult(notes=notes.all(), runs=runs, basis=record_basis(original))


def follow_load(
    deployment: DeploymentMap,
    arrivals: Mapping[str, ArrivalProcess],
    options: SimulationOptions,
    period_s: float,
    policy: str | None,
    db: Path | None,
    tell: Callable[[float], None] = say_nothing,
    note: NoteCallback = say_nothing,
) -> ScheduledRun:
    """Simulate the map, replanned by ``policy``, by default the map's own, after each period for its rates.

    Raises `InputError` when the duration is not longer than a period, or device failures are simulated as well.

    ``db``: kernel database of the policy's estimator; ``tell``: called with the simulated fraction.
    """
    if options.failures:
        raise InputError("--reschedule and --fail exclude each other: the policies know nothing of failures")
    if period_s >= options.duration_s:
        raise InputError(f"--reschedule must be shorter than the duration of {options.duration_s:g} s")
    rates = observed_rates(deployment, arrivals, options, period_s)
    scheduler = make_scheduler(deployment, policy, db, note)
    table = make_timetable(deployment, rates, period_s, scheduler, MoveCosts(), options.duration_s)
    moving = replace(options, switches=table.switches, absent=table.absent)
    outcome = simulate_all(table.deployment, arrivals, moving, tell)
    return ScheduledRun(policy, table, replace(outcome, epochs=table.epochs))


def make_scheduler(
    deployment: DeploymentMap, policy: str | None, db: Path | None, note: NoteCallback = say_nothing
) -> Scheduler:
    """Return a scheduler that plans maps for the observed rates, with headroom and the settings of the map.

    Each map is planned from its predecessor, so that few replicas move. Rates that the policy cannot place on the
    available devices leave the map unchanged; a note reports the first time. Raises `InputError` when the policy is
    unknown, or the database lacks data of the plan; the scheduler itself raises `GpuprofError` when planning fails for
    another reason than lack of capacity.
    """
    problem = restore_problem(deployment, db, note)
    planner = restore_policy(deployment) if policy is None else make_policy(policy, {})

    running, is_told = deployment, False

    def tell_unplaced(reason: str) -> None:
        nonlocal is_told
        if not is_told:
            note(f"rates that cannot be placed leave the map as it is, first: {reason}")
        is_told = True

    def scheduler(rates: Mapping[str, float]) -> DeploymentMap | None:
        nonlocal running
        # A model without requests keeps the smallest replica for later requests.
        demands = tuple(
            replace(demand, rate_rps=max(HEADROOM * rates[demand.model], 0.01 * demand.rate_rps))
            for demand in problem.demands
        )
        try:
            plan = plan_map(replace(problem, demands=demands, previous=running), planner)
        except InfeasibleError as error:
            tell_unplaced(error.message)
            return None
        except GpuprofError as error:
            # The same kind, for its exit code.
            raise type(error)(f"while rescheduling: {error.message}", error.fix) from None
        if plan.unplaced:
            tell_unplaced(f"{plan.unplaced[0].model}: {plan.unplaced[0].reason}")
            return None
        running = plan
        return plan

    return scheduler
