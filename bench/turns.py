"""What turns inside shares save: `gpulet` without and with temporal sharing, on published profiles.

    python -m bench.turns [--reference DIRECTORY] [--parts 1,2,4,10]

iGniter's twelve workloads by its model of interference (batches within half of the SLO), and ParvaGPU's scenarios by
shares of MPS interpolated from its MIG profiles (within 0.45 of it), at their published rates and at parts of these.
Printed are the GPUs of `gpulet`, of `gpulet -O temporal=true`, of ParvaGPU's and iGniter's own policies where they run
on the same shares, how many replicas take turns in how many shares, and what the independent check says of the maps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.igniter_profiles import DEVICE as V100
from bench.igniter_profiles import read_estimator, table_3
from bench.parvagpu_profiles import name_copies, scenario
from bench.reproduce.parvagpu_runs import BUDGET, SCENARIOS
from bench.reproduce.parvagpu_runs import DEVICE as A100
from bench.reproduce.stand_in_db import estimate_mps
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.map_summary import describe_turns
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.estimators.services import name_services
from gpuprof.placement.comparison import Outcome, compare
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem

REFERENCE = Path("../shared/reference")
_POLICIES = {"gpulet": {}, "by turns": {"temporal": "true"}}
_WIDTHS = (14, 8, 8, 10, 10)


def main() -> None:
    """Print a line for each problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    parser.add_argument("--parts", default="1,2,4,10", help="rates are divided by these")
    given = parser.parse_args()
    head = ("workloads", "rates", "gpulet", "by turns", "igniter")
    print("".join(f"{one:>{width}}" for one, width in zip(head, _WIDTHS, strict=True)))
    for part in map(int, given.parts.split(",")):
        for name, problem in list_problems(given.reference, part):
            print(_line(name, part, problem), flush=True)


def list_problems(reference: Path, part: int) -> Iterator[tuple[str, Problem]]:
    """Yield the published problems with their rates divided by ``part``."""
    models, demands = table_3()
    fitted = read_estimator(reference / "igniter_v100" / "config.jsonl", models)
    yield "W1-W12", _pose(fitted, demands, V100, 0.5, part)
    directory = reference / "parvagpu_a100"
    by_shares = name_services(estimate_mps(directory), name_copies(directory, 1))
    for number in SCENARIOS:
        yield f"S{number}", _pose(by_shares, scenario(directory, number, 1), A100, BUDGET, part)


def _pose(estimator: Estimator, demands: tuple[Demand, ...], kind: str, budget: float, part: int) -> Problem:
    slower = tuple(replace(one, rate_rps=one.rate_rps / part) for one in demands)
    fleet = Fleet((FleetEntry(device(kind)),))
    return Problem(slower, fleet, estimator, BatchQueue(), Options(latency_budget=budget))


def _line(name: str, part: int, problem: Problem) -> str:
    policies = [(said, make_policy("gpulet", options)) for said, options in _POLICIES.items()]
    found = compare(problem, [*policies, ("igniter", make_policy("igniter"))])
    cells = (name, f"1/{part}" if part > 1 else "1", *(_say(outcome) for outcome in found))
    turns = found[1].deployment and describe_turns(found[1].deployment)
    line = "".join(f"{one:>{width}}" for one, width in zip(cells, _WIDTHS, strict=True))
    broken = [violation for outcome in found[:2] for violation in outcome.violations]
    return line + f"  {turns or 'no turns'}" + (f"  BROKEN: {broken[0]}" if broken else "")


def _say(outcome: Outcome) -> str:
    if outcome.objective is None:
        return "–"
    return f"{outcome.objective.gpus}{'*' if outcome.missing_rps > 0 else ''}"  # *: not all is served


if __name__ == "__main__":
    main()
