"""GPUs and waiting while the map follows a bursty load, by scheduler (USHER, OSDI'24, §5.4 and Figure 24).

    python -m bench.reproduce.usher_following [--seconds 1000]

The paper shows 1000 s of the Azure trace of 2021, which it does not publish with its assignment to models. Here the
load is piecewise constant: every 45 to 300 s, as often as bursts come (§5.2.1), it changes to between 0.4 and 1.6 of
the mean. Every 20 s a scheduler plans for 1.2 times the rates of that time; a new replica begins after the paper's
0.51 s of deciding and 0.63 s of loading (Table 2). Shares take the times that each scheduler plans with.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpuprof.cli.output import Format, print_rows
from gpuprof.domain.arrival_process import ArrivalProcess, RecordedArrivals
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.table import Column
from gpuprof.lab.cells import LabCell, make_problem, parse_policy
from gpuprof.lab.laboratory import PrintedNumber
from gpuprof.lab.scenarios import find_scenario
from gpuprof.placement.deploy import to_map
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.reschedule import Autoscaling, MoveCosts, make_timetable, observed_rates, summarize_autoscaling

#: The testbed's load (§5.3.2) and the window of Figure 24.
_RATE_RPS, _SECONDS = 8000.0, 1000.0
_LOAD_S = 0.51 + 0.63
_STRETCH_S, _SURGE = (45.0, 300.0), (0.4, 1.6)
_PERIOD_S, _HEADROOM = 20.0, 1.2
#: §5.4: how many times fewer GPUs USHER takes.
_PRINTED = (1.6, 3.9)
_SCHEDULERS = {
    "usher": "usher",
    "usher by WAO": "usher+creq=wao",
    "usher by WSM": "usher+creq=wsm",
    "whole GPUs": "optimal@whole",
    "gpulet": "gpulet",
    "optimal": "optimal",
}
_USHERS, _BASELINES = ("usher", "usher by WAO", "usher by WSM"), ("whole GPUs", "gpulet")


def main() -> int:
    """Print how each scheduler follows the load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as work:
        figures = {name: follow(policy, seconds, Path(work)) for name, policy in _SCHEDULERS.items()}
    rows = [
        {
            "scheduler": name,
            "mean GPUs": figure.mean_gpus,
            "most GPUs": figure.most_gpus,
            "maps": figure.maps,
            "replicas started": figure.started,
            "in time %": figure.in_time_pct,
            "mean wait ms": figure.wait_ms,
        }
        for name, figure in figures.items()
    ]
    columns = [Column(key, key, NumberFormat(4)) for key in rows[0]]
    print_rows(rows, columns, Format.TABLE, f"USHER Figure 24: {_RATE_RPS:g} requests/s in the mean for {seconds:g} s")
    printed = [
        PrintedNumber(
            f"{usher}: times fewer GPUs than {baseline}",
            "§5.4",
            _PRINTED,
            figures[baseline].mean_gpus / figures[usher].mean_gpus,
            1,
        ).row()
        for usher in _USHERS
        for baseline in _BASELINES
    ]
    print_rows(printed, [Column(key, key) for key in printed[0]], Format.TABLE)
    return 0


def surging(shares: Mapping[str, float], rate_rps: float, seconds: float) -> dict[str, ArrivalProcess]:
    """Return requests of each model at rates that all change together, drawn uniformly."""
    random = np.random.default_rng(24)
    pieces: dict[str, list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = {model: [] for model in shares}
    begin = 0.0
    while begin < seconds:
        end = min(seconds, begin + random.uniform(*_STRETCH_S))
        surge = random.uniform(*_SURGE)
        for model, share in shares.items():
            count = random.poisson(share * rate_rps * surge * (end - begin))
            pieces[model].append(np.sort(random.uniform(begin, end, count) * 1e9).astype(np.int64))
        begin = end
    return {model: RecordedArrivals(np.concatenate(gaps), seconds) for model, gaps in pieces.items()}


def follow(policy: str, seconds: float, work: Path, rate_rps: float = _RATE_RPS) -> Autoscaling:
    """Return how a policy follows the load: maps planned anew every 20 s, simulated one after another."""
    scenario = find_scenario("usher", "V100", work)
    scenario = scenario.vary(rate=rate_rps / sum(demand.rate_rps for demand in scenario.demands))
    problem, _ = make_problem(LabCell(scenario, policy), work, work)
    planner = parse_policy(policy)
    load = surging({demand.model: demand.rate_rps / rate_rps for demand in scenario.demands}, rate_rps, seconds)
    running: DeploymentMap | None = None

    def plan(rates: Mapping[str, float]) -> DeploymentMap:
        nonlocal running
        demands = tuple(
            replace(demand, rate_rps=max(1.0, _HEADROOM * rates[demand.model])) for demand in problem.demands
        )
        anew = replace(problem, demands=demands, previous=running)
        running = to_map(anew, planner.place(anew))
        return running

    first = plan({demand.model: demand.rate_rps for demand in problem.demands})
    options = SimulationOptions(seconds, warmup_s=min(_PERIOD_S, seconds / 10.0), refuse_hopeless=False)
    rates = observed_rates(first, load, options, _PERIOD_S)
    table = make_timetable(first, rates, _PERIOD_S, plan, MoveCosts(load_s=_LOAD_S), seconds)
    outcome = simulate(table.deployment, load, replace(options, switches=table.switches, absent=table.absent))
    return summarize_autoscaling("", table, outcome)


if __name__ == "__main__":
    sys.exit(main())
