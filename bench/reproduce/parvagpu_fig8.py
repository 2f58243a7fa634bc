"""Part of the batches and requests within their SLOs, by policy and scenario (ParvaGPU, SC'24, Figure 8).

    python -m bench.reproduce.parvagpu_fig8 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profiles that its authors publish: put prof_data and SLO of https://github.com/MunQ-Lee/ParvaGPU_SC24 into
DIRECTORY/parvagpu_a100.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.parvagpu_profiles import read_latencies
from bench.reproduce import command
from bench.reproduce.parvagpu_runs import POLICIES, SCENARIOS, SOURCE, list_lines, scenarios, sound
from bench.reproduce.reproduction import Fact, Reproduction
from bench.reproduce.served_map import rewritten
from bench.reproduce.stand_in_db import read_mps_latencies
from gpuprof.domain.arrival_process import ArrivalProcess, DeterministicArrivals
from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition, Replica, share_of
from gpuprof.domain.estimate import Workload
from gpuprof.placement.comparison import Outcome
from gpuprof.reporting.chart import Axis, Chart, group_bars
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate

_SECONDS = 5.0
#: §IV-C1: compliance in percent that the paper gives in words.
_SAID = {("parvagpu", 2): 100.0, ("gpulet", 2): 96.5}

_WHY = (
    "The paper measures batches on A100s. Here every map is simulated for 5 s with requests coming evenly at the rates "
    "asked for, batches as long as the published measurements say, by the rules of gpuprof's own server, but without "
    "its refusals: the part of the requests that is answered within the SLO.",
    "The time of batches between those measured is interpolated.",
    "gpulet's 3.5% of violations in S2 come from neighbours that it misjudged. Neighbours by MPS were not published; "
    "here they cost nothing, so that gpulet breaks nothing.",
)


def compute(reference: Path, numbers: Sequence[int] = SCENARIOS) -> Reproduction:
    """Place the scenarios by all policies and simulate each map."""
    directory = command.find_published(reference, "parvagpu_a100", SOURCE)
    measured = {**read_latencies(directory), **read_mps_latencies(directory)}
    runs = scenarios(reference, numbers)
    met = {name: [_met_pct(run[name], measured) for run in runs] for name in POLICIES}
    groups = tuple(f"S{number}" for number in numbers)
    facts = tuple(
        Fact(f"{name} in S{number}, %", "§IV-C1", printed, met[name][list(numbers).index(number)], 1)
        for (name, number), printed in _SAID.items()
        if number in numbers
    )
    title = "Requests within their SLO (ParvaGPU, Figure 8)"
    bars = group_bars(groups, met, "% within the SLO")
    return Reproduction(
        title="ParvaGPU Figure 8: requests within their SLO in percent, by scenario",
        header=("policy", *groups),
        rows=tuple((name, *values) for name, values in met.items()),
        facts=facts,
        differences=_WHY,
        charts=(Chart(title, Axis("scenario", names=groups), Axis("% within the SLO"), boxes=bars),),
        sound=sound(runs),
        commands=list_lines(reference, numbers),
    )


def _met_pct(outcome: Outcome, measured: Mapping[Workload, float]) -> float | None:
    """Return the part of all requests within their SLOs; None where the map does not serve everything."""
    if outcome.deployment is None or outcome.missing_rps > 0:
        return None
    served = with_times(outcome.deployment, measured)
    arrivals: dict[str, ArrivalProcess] = {
        name: DeterministicArrivals(model.rate_rps) for name, model in served.models.items()
    }
    seen = simulate(served, arrivals, SimulationOptions(_SECONDS, warmup_s=1.0, refuse_hopeless=False)).models
    return 100.0 * sum(one.in_time for one in seen) / sum(one.requests for one in seen)


def with_times(deployment: DeploymentMap, measured: Mapping[Workload, float]) -> DeploymentMap:
    """Return the map with the time of every batch up to each replica's, between those measured on a line."""

    def time_replica(gpu: Gpu, partition: Partition, replica: Replica) -> Replica:
        share = share_of(partition, replica)
        sizes = sorted(
            one.batch
            for one in measured
            if (one.model, one.share, one.processes) == (replica.model, share, replica.processes)
        )
        times = [measured[Workload(replica.model, size, share, replica.processes)] for size in sizes]
        each = np.interp(np.arange(1, replica.batch + 1), sizes, times)
        return replica.model_copy(update={"batch_latency_ms": tuple(each.tolist())})

    return rewritten(deployment, time_replica)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
