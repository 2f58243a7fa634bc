"""Brings the placement policies into a simulation: ``gpuprof simulate --reschedule``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import GpuprofError, InfeasibleError, InputError
from gpuprof.pipeline.result import NoteCallback, say_nothing

if TYPE_CHECKING:
    from gpuprof.domain.arrival_process import ArrivalProcess
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.pipeline.simulation_settings import Rescheduling
    from gpuprof.simulator.cluster import SimulationOptions
    from gpuprof.simulator.outcome import SimulationOutcome
    from gpuprof.simulator.reschedule import MoveCosts, Scheduler, Timetable


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """A simulation, and how the map followed the load."""

    policy: str | None  #: None: the map's own.
    timetable: Timetable | None  #: None: the map stayed.
    outcome: SimulationOutcome


def plan_timetable(
    deployment: DeploymentMap,
    arrivals: Mapping[str, ArrivalProcess],
    options: SimulationOptions,
    period_s: float,
    scheduler: Scheduler,
    costs: MoveCosts,
) -> Timetable:
    """Return the run times of each replica when ``scheduler`` plans every ``period_s``.

    Raises `InputError` when the duration is not longer than a period, or device failures are simulated as well.
    """
    from gpuprof.simulator.reschedule import make_timetable, observed_rates

    if options.failures:
        raise InputError("--reschedule and --fail exclude each other: the policies know nothing of failures")
    if period_s >= options.duration_s:
        raise InputError(f"--reschedule must be shorter than the duration of {options.duration_s:g} s")
    return make_timetable(
        deployment, observed_rates(deployment, arrivals, options, period_s), period_s, scheduler, costs
    )


def check_policies(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of policies. Raises `InputError` for an unknown or repeated name."""
    from gpuprof.placement.policies import make_policy

    if len(set(names)) < len(names):
        raise InputError(f"--policy names a policy twice: {','.join(names)}")
    for name in names:
        make_policy(name, {})
    return tuple(names)


def follow_load(
    deployment: DeploymentMap,
    arrivals: Mapping[str, ArrivalProcess],
    options: SimulationOptions,
    rescheduling: Rescheduling,
    policy: str | None,
    db: Path | None,
    simulate: Callable[[DeploymentMap, SimulationOptions], SimulationOutcome],
    note: NoteCallback = say_nothing,
) -> ScheduledRun:
    """Simulate the map with rescheduling by ``policy``; None: the map's own.

    ``simulate`` simulates a map with options, ``db`` is the kernel database of the policy's estimator.
    """
    from gpuprof.simulator.reschedule import MoveCosts

    scheduler = make_scheduler(deployment, policy, rescheduling.headroom, db, note)
    costs = MoveCosts(rescheduling.load_s, rescheduling.mig_s)
    table = plan_timetable(deployment, arrivals, options, rescheduling.period_s, scheduler, costs)
    outcome = simulate(table.deployment, replace(options, switches=table.switches, absent=table.absent))
    return ScheduledRun(policy, table, replace(outcome, epochs=table.epoch_outcomes(options.duration_s)))


def make_scheduler(
    deployment: DeploymentMap, policy: str | None, headroom: float, db: Path | None, note: NoteCallback = say_nothing
) -> Scheduler:
    """Return a scheduler that places the observed rates, times ``headroom``, under the settings of the map's problem.

    Each map is planned from its predecessor, so that few replicas move. Rates that the policy cannot place on the
    available devices leave the map unchanged; a note reports the first time. Raises `InputError` when the policy is
    unknown, or the database lacks data of the plan; the scheduler itself raises `GpuprofError` when planning fails for
    another reason than lack of capacity.
    """
    from gpuprof.pipeline.place import plan_map
    from gpuprof.pipeline.recorded_problem import restore_policy, restore_problem
    from gpuprof.placement.policies import make_policy

    problem = restore_problem(deployment, db, note)
    made = restore_policy(deployment) if policy is None else make_policy(policy, {})

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
            replace(demand, rate_rps=max(headroom * rates[demand.model], 0.01 * demand.rate_rps))
            for demand in problem.demands
        )
        try:
            wanted = plan_map(replace(problem, demands=demands, previous=running), made)
        except InfeasibleError as error:
            tell_unplaced(error.message)
            return None
        except GpuprofError as error:
            # The same kind, for its exit code.
            raise type(error)(f"while rescheduling: {error.message}", error.fix) from None
        if wanted.unplaced:
            tell_unplaced(f"{wanted.unplaced[0].model}: {wanted.unplaced[0].reason}")
            return None
        running = wanted
        return wanted

    return scheduler
