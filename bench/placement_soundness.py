"""Random placement problems of six kinds: how often a map or a bound of ``optimal`` is wrong, and what it leaves.

    python -m bench.placement_soundness --problems 100

What is best comes from `bench.placement_problems`, which shares no code with the placement.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass, field

from bench.placement_problems import KINDS, Best, Kind, TooLargeError, best_of, draw_problem
from gpuprof.placement.contract import evidence
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Problem

_LITTLE = 1e-6


@dataclass
class SoundnessTally:
    """Counts over the problems of one kind.

    Attributes
    ----------
    problems, too_large, unsound, false_bounds, untold : int
        Drawn; left out since the listing would take too long; maps that break a rule; bounds that the best map
        exceeds; maps that are worse than the best where the bound says that they are the best.
    losses : list of float
        Where the map is not the best: the part of devices more, or of goodput less.
    """

    problems: int = 0
    too_large: int = 0
    unsound: int = 0
    false_bounds: int = 0
    untold: int = 0
    losses: list[float] = field(default_factory=list)

    def add(self, problem: Problem) -> None:
        """Place one problem and compare."""
        self.problems += 1
        try:
            best = best_of(problem)
        except TooLargeError:
            self.too_large += 1
            return
        placement = make_policy("optimal").place(problem)
        self.unsound += bool(check(to_map(problem, placement), evidence(problem)))
        self.false_bounds += is_bound_false(placement, best)
        loss = loss_of(problem, placement, best)
        if loss > _LITTLE:
            self.losses.append(loss)
            self.untold += is_called_best(problem, placement)


def is_bound_false(placement: Placement, best: Best) -> bool:
    """Whether the best map does better than a bound of the placement says that any map can."""
    if best.cost_per_hour is not None and best.gpus is not None:
        cost, gpus = placement.lower_bound_cost_per_hour, placement.lower_bound_gpus
        dear = cost is not None and cost > best.cost_per_hour * (1.0 + _LITTLE)
        return dear or (gpus is not None and gpus > best.gpus)
    most = placement.upper_bound_goodput_rps
    return most is not None and best.goodput_rps is not None and best.goodput_rps > most * (1.0 + _LITTLE)


def loss_of(problem: Problem, placement: Placement, best: Best) -> float:
    """Return by what part the placement is worse than the best; negative where the listing missed something."""
    if best.cost_per_hour is not None:
        cost = sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
        return math.inf if placement.unplaced else cost / best.cost_per_hour - 1.0
    rates = placement.rates_rps()
    for level, most in zip(sorted({d.priority for d in problem.demands}, reverse=True), best.served_rps, strict=True):
        served = sum(rates.get(d.model, 0.0) for d in problem.demands if d.priority == level)
        if most and abs(1.0 - served / most) > _LITTLE:
            return 1.0 - served / most
    return 0.0


def is_called_best(problem: Problem, placement: Placement) -> bool:
    """Whether the bound of a placement says that nothing is better."""
    if placement.unplaced:
        most = placement.upper_bound_goodput_rps
        return most is not None and sum(placement.rates_rps().values()) >= most * (1.0 - _LITTLE)
    bound = placement.lower_bound_cost_per_hour
    cost = sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
    return bound is not None and cost <= bound * (1.0 + _LITTLE)


def run(kind: Kind, problems: int, first: int = 0) -> SoundnessTally:
    """Return the counts over so many problems of a kind."""
    tally = SoundnessTally()
    for seed in range(first, first + problems):
        tally.add(draw_problem(kind, seed))
    return tally


def main() -> None:
    """Print a line a kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=100, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--kinds", default=",".join(KINDS))
    chosen = parser.parse_args()
    print(
        f"{'kind':12}{'compared':>9}{'unsound':>9}{'false bounds':>14}{'not best':>10}{'median, most':>16}{'untold':>8}"
    )
    for kind in KINDS:
        if kind not in chosen.kinds.split(","):
            continue
        tally = run(kind, chosen.problems, chosen.first)
        losses = f"{statistics.median(tally.losses):.1%}, {max(tally.losses):.1%}" if tally.losses else ""
        compared = tally.problems - tally.too_large
        print(
            f"{kind:12}{compared:9}{tally.unsound:9}{tally.false_bounds:14}{len(tally.losses):10}"
            f"{losses:>16}{tally.untold:8}"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
