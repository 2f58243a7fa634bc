"""ParvaGPU's scenarios (SC'24, Table IV) through every policy, on the profiles that its authors publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.parvagpu_profiles import name_copies, read_profiles, scenario
from bench.reproduce.command import find_published
from bench.reproduce.stand_in_db import estimate_mps
from gpuprof.domain.catalogue import device
from gpuprof.domain.deployment import Replica
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.estimators.services import name_services
from gpuprof.placement.comparison import Outcome, compare
from gpuprof.placement.objective import measure
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.gpulet import Gpulet
from gpuprof.placement.published.igniter import Igniter
from gpuprof.placement.published.mig_serving import MigServing
from gpuprof.placement.published.parvagpu import ParvaGpu

SOURCE = "prof_data and SLO of https://github.com/MunQ-Lee/ParvaGPU_SC24"
DEVICE = "a100-80"
SCENARIOS = (1, 2, 3, 4, 5, 6)
#: iGniter does not run in S5 and S6 (§IV-B1): the scenarios before those.
IGNITER_RUNS = 4
#: The published code tests latency < 0.45 × SLO where the paper says one half, and its maps hold up to five processes.
BUDGET, PROCESSES = 0.45, 5

#: Those that share a GPU by MPS alone, for which the authors publish no profiles.
BY_MPS: Mapping[str, Policy] = {"gpulet": Gpulet(), "igniter": Igniter()}
BY_MIG: Mapping[str, Policy] = {
    "mig-serving": MigServing(),
    "parvagpu-single": ParvaGpu(single=True),
    "parvagpu-unoptimized": ParvaGpu(processes=PROCESSES, unoptimized=True),
    "parvagpu": ParvaGpu(processes=PROCESSES),
    "ffd": FirstFitDecreasing(),
    "optimal": Optimal(),
}
POLICIES = (*BY_MPS, *BY_MIG)


def scenarios(reference: Path, numbers: Sequence[int] = SCENARIOS, copies: int = 1) -> list[dict[str, Outcome]]:
    """Return for each scenario what each policy made of it, every service ``copies`` times.

    Raises
    ------
    InputError
        When the published profiles are not there.
    """
    directory = find_published(reference, "parvagpu_a100", SOURCE)
    return [_place_scenario(directory, number, copies) for number in numbers]


def _place_scenario(directory: Path, number: int, copies: int) -> dict[str, Outcome]:
    profiles = read_profiles(directory, copies)
    by_shares = name_services(estimate_mps(directory), name_copies(directory, copies))
    demands = scenario(directory, number, copies)
    fleet = Fleet((FleetEntry(device(DEVICE)),))
    by_mig = Problem(demands, fleet, profiles, BatchQueue(), Options(latency_budget=BUDGET, max_processes=PROCESSES))
    by_mps = Problem(demands, fleet, by_shares, BatchQueue(), Options(latency_budget=BUDGET))
    outcomes = (*compare(by_mps, list(BY_MPS.items())), *compare(by_mig, list(BY_MIG.items())))
    return {outcome.policy: outcome for outcome in outcomes}


def sound(runs: Sequence[Mapping[str, Outcome]]) -> bool:
    """Whether every map passed the independent check."""
    return not any(outcome.violations for run in runs for outcome in run.values())


def gpus(outcome: Outcome) -> int | None:
    """Return how many GPUs a map has; None where the policy made none that serves everything."""
    if outcome.objective is None or outcome.missing_rps > 0:
        return None
    return outcome.objective.gpus


def saved_pct(runs: Sequence[Mapping[str, Outcome]], other: str) -> float | None:
    """Return how many fewer GPUs than ``other`` ParvaGPU takes, the mean over the scenarios in percent."""
    pairs = [(gpus(run["parvagpu"]), gpus(run[other])) for run in runs]
    kept = [100.0 * (1.0 - own / its) for own, its in pairs if own is not None and its is not None]
    return sum(kept) / len(kept) if kept else None


def fragmentation(outcome: Outcome) -> float | None:
    """Return the part of the GPUs that belongs to no share (equation 4, as Figure 7 draws it).

    Of a GPU cut up by MIG only the compute units that instances can have count, 98 of an A100's 108.
    """
    if outcome.objective is None or outcome.deployment is None:
        return None
    a100 = device(DEVICE)
    cut = any(partition.mig for _, _, partition, _ in outcome.deployment.places())
    most = max(profile.sms for profile in a100.mig_profiles) if cut else a100.compute_units
    held = (1.0 - outcome.objective.external_fragmentation) * a100.compute_units / most
    return max(0.0, 1.0 - held)


def slack(outcome: Outcome, activity: Callable[[str, Replica], float]) -> float | None:
    """Return the internal slack (equation 3) with this activity of busy shares."""
    if outcome.deployment is None:
        return None
    return measure(outcome.deployment, {DEVICE: device(DEVICE)}, activity).internal_slack
