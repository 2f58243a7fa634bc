"""iGniter's twelve workloads (TPDS'22, Table 3) by each policy, with every map seen through iGniter's own model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.igniter_profiles import table_3
from bench.published_measurements import published_estimator
from bench.reproduce.command import find_published
from bench.reproduce.place_lines import PlaceLines, make_named_policy
from bench.reproduce.served_map import rewritten
from gpuprof.domain.arrival_process import ArrivalProcess, DeterministicArrivals
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition, Replica, share_of
from gpuprof.domain.estimate import Estimator, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.comparison import Outcome, compare
from gpuprof.placement.problem import ModelFile, Options, Problem
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate

SOURCE = "i-Gniter/Algorithm/config of https://github.com/icloud-ecnu/igniter"
#: Half of the SLO is for the inference, half for filling the batch (§3.1, equation 12).
BUDGET = 0.5
#: Where the profile is in the directory of published measurements.
_PROFILE = Path("igniter_v100", "config.jsonl")
_RULES = ("--estimator", "igniter", "--latency-budget", str(BUDGET), "--gpus")
_SECONDS = 30.0
#: A workload that gets less than this part of its rate breaks its throughput.
_THROUGHPUT = 0.99


def v100_estimator(reference: Path) -> Estimator:
    """Return what ``--estimator igniter`` says of the twelve by iGniter's published profile of the V100.

    Raises
    ------
    InputError
        When the profile is not there.
    """
    return published_estimator("igniter", find_profile(reference), table_3()[0])


def find_profile(reference: Path) -> Path:
    """Return iGniter's published profile.

    Raises
    ------
    InputError
        When it is not there.
    """
    return find_published(reference, _PROFILE.parent.name, SOURCE) / _PROFILE.name


def problem(estimator: Estimator, kinds: Sequence[str]) -> Problem:
    """Return the twelve workloads on as many as needed of these devices."""
    models, demands = table_3()
    return Problem(
        demands=demands,
        fleet=Fleet(tuple(FleetEntry(device(kind)) for kind in kinds)),
        estimator=estimator,
        queueing=BatchQueue(),
        options=Options(latency_budget=BUDGET),
        files={name: ModelFile(None, model) for name, model in models.items()},
    )


def place(given: Problem, name: str, policy: str) -> Outcome:
    """Return what a policy makes of the problem; ``violations`` of maps that regard no neighbours are for counting."""
    return compare(given, [(name, make_named_policy(policy))])[0]


def list_lines(
    reference: Path,
    policies: Iterable[str],
    workloads: tuple[Mapping[str, str], Sequence[Demand]] | None = None,
    name: str = "twelve",
    limit: Sequence[str] = (),
) -> tuple[str, ...]:
    """Write the demands and return the lines that place them on V100, by default the twelve."""
    lines, (models, demands) = PlaceLines(), workloads or table_3()
    database = lines.add_import(reference / _PROFILE, "igniter-db")
    for policy in policies:
        lines.add_place(name, demands, database, (*_RULES, "v100", *limit), policy, models)
    return lines.lines()


def list_stand_in_lines(
    profile: Path, kinds: Sequence[str], choices: Iterable[Sequence[str]], policy: str
) -> tuple[str, ...]:
    """Write the demands of the twelve and return the lines that place them on each choice of these kinds."""
    lines, (models, demands) = PlaceLines(), table_3()
    database = lines.add_stand_in("igniter-kinds-db", "--igniter", str(profile), "--gpus", ",".join(kinds))
    for chosen in choices:
        lines.add_place("twelve", demands, database, (*_RULES, ",".join(chosen)), policy, models)
    return lines.lines()


def find_missed(deployment: DeploymentMap, estimator: Estimator) -> tuple[str, ...]:
    """Return the workloads that miss their SLO or their rate in a simulation of the map with interference.

    Requests come evenly, a batch waits for half of the SLO, loading overlaps with computing (equation 2) and so is a
    time on the way; a batch takes what iGniter's model says beside all that stand on the same GPU.
    """
    served, legs = with_interference(deployment, estimator)
    arrivals: dict[str, ArrivalProcess] = {
        name: DeterministicArrivals(model.rate_rps) for name, model in served.models.items()
    }
    options = SimulationOptions(_SECONDS, warmup_s=1.0, refuse_hopeless=False, legs_ms=legs)
    broken = []
    for outcome in simulate(served, arrivals, options).models:
        answered = outcome.answered / max(1, outcome.requests)
        if outcome.p99_ms is None or outcome.p99_ms > outcome.slo_ms or answered < _THROUGHPUT:
            broken.append(outcome.model)
    return tuple(broken)


def with_interference(
    deployment: DeploymentMap, estimator: Estimator
) -> tuple[DeploymentMap, dict[str, tuple[float, float]]]:
    """Return the map with the times of its replicas beside one another, and how long loading a full batch takes."""
    legs: dict[str, tuple[float, float]] = {}

    def slow_down(gpu: Gpu, partition: Partition, replica: Replica) -> Replica:
        share = share_of(partition, replica)
        beside = [Workload(r.model, r.batch, share_of(partition, r)) for r in partition.replicas if r is not replica]
        sizes = [
            estimator.estimate(replica.model, device(gpu.device), size, share, beside)
            for size in range(1, replica.batch + 1)
        ]
        legs[replica.model] = (sizes[-1].overlapped_ms, 0.0)
        times = tuple(one.latency_ms.value - one.overlapped_ms for one in sizes)
        wait = BUDGET * deployment.models[replica.model].slo_ms
        return replica.model_copy(update={"batch_latency_ms": times, "max_wait_ms": wait})

    return rewritten(deployment, slow_down), legs
