"""ParvaGPU's scenarios (SC'24, Table IV) through every policy, on the profiles that its authors publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.parvagpu_profiles import name_copies, read_profiles, scenario
from bench.reproduce.command import find_published
from bench.reproduce.place_lines import PlaceLines, make_named_policy
from bench.reproduce.stand_in_db import estimate_mps
from gpuprof.domain.catalogue import device
from gpuprof.domain.deployment import Replica
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.estimators.services import name_services
from gpuprof.placement.comparison import Outcome, compare
from gpuprof.placement.objective import measure
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options, Problem

SOURCE = "prof_data and SLO of https://github.com/MunQ-Lee/ParvaGPU_SC24"
DEVICE = "a100-80"
SCENARIOS = (1, 2, 3, 4, 5, 6)
#: iGniter does not run in S5 and S6 (§IV-B1): the scenarios before those.
IGNITER_RUNS = 4
#: The published code tests latency < 0.45 × SLO where the paper says one half, and its maps hold up to five processes.
BUDGET, PROCESSES = 0.45, 5

#: Policies as `gpuprof place` is told them. First those that share a GPU by MPS alone, for which the authors publish no
#: profiles.
BY_MPS: Mapping[str, str] = {"gpulet": "gpulet", "igniter": "igniter"}
BY_MIG: Mapping[str, str] = {
    "mig-serving": "bench.baselines.mig_serving:MigServing",
    "parvagpu-single": "parvagpu -O single=true",
    "parvagpu-unoptimized": f"parvagpu -O processes={PROCESSES} -O unoptimized=true",
    "parvagpu": f"parvagpu -O processes={PROCESSES}",
    "ffd": "ffd",
    "optimal": "optimal",
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
    outcomes = (*compare(by_mps, _make_policies(BY_MPS)), *compare(by_mig, _make_policies(BY_MIG)))
    return {outcome.policy: outcome for outcome in outcomes}


def _make_policies(named: Mapping[str, str]) -> list[tuple[str, Policy]]:
    return [(name, make_named_policy(policy)) for name, policy in named.items()]


def list_lines(reference: Path, numbers: Sequence[int] = SCENARIOS, copies: Sequence[int] = (1,)) -> tuple[str, ...]:
    """Write the demands of `scenarios` and return the lines that place them as it does.

    Raises
    ------
    InputError
        When the published profiles are not there.
    """
    directory = find_published(reference, "parvagpu_a100", SOURCE)
    lines = PlaceLines()
    by_mig = lines.add_import(directory, "parvagpu-db")
    by_mps = lines.add_stand_in("parvagpu-mps-db", "--instances", str(directory))
    rules = ("--latency-budget", str(BUDGET), "--gpus", DEVICE)
    for count in copies:
        models = name_copies(directory, count)
        for number in numbers:
            name, demands = f"S{number}" if count == 1 else f"S{number}x{count}", scenario(directory, number, count)
            for policy in BY_MPS.values():
                lines.add_place(name, demands, by_mps, ("--estimator", "usher", *rules), policy, models)
            own = ("--estimator", "measured", "--max-processes", str(PROCESSES), *rules)
            for policy in BY_MIG.values():
                lines.add_place(name, demands, by_mig, own, policy, models)
    return lines.lines()


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
