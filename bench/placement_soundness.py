"""Random placement problems of six kinds: how often a map or a bound of ``optimal`` is wrong, and what it leaves.

    python -m bench.placement_soundness --problems 500 [--first SEED] [--kinds A,B] [--keep FILE]

What is best comes from `bench.placement_problems`, which shares no code with the placement. With ``--keep`` a run that
is cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.kept_rows import KeptRows, Row
from bench.placement_problems import KINDS, Best, Kind, TooLargeError, best_of, draw_problem
from gpuprof.placement.contract import evidence
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Problem

_LITTLE = 1e-6


@dataclass(frozen=True)
class Verdict:
    """What became of one problem.

    Attributes
    ----------
    too_large, unsound, false_bound, untold : bool
        Left out since the listing would take too long; the map breaks a rule; the best map exceeds the bound; the map
        is worse than the best while the bound says that it is the best.
    loss : float
        Where the map is not the best: the part of devices more, or of goodput less. Negative: the listing missed a map.
    listing_s, placing_s : float
    """

    too_large: bool = False
    unsound: bool = False
    false_bound: bool = False
    untold: bool = False
    loss: float = 0.0
    listing_s: float = 0.0
    placing_s: float = 0.0


def judge(problem: Problem) -> Verdict:
    """Place one problem and compare."""
    started = time.perf_counter()
    try:
        best = best_of(problem)
    except TooLargeError:
        return Verdict(too_large=True, listing_s=time.perf_counter() - started)
    listed = time.perf_counter()
    placement = make_policy("optimal").place(problem)
    placed = time.perf_counter()
    loss = loss_of(problem, placement, best)
    return Verdict(
        unsound=bool(check(to_map(problem, placement), evidence(problem))),
        false_bound=is_bound_false(placement, best),
        untold=loss > _LITTLE and is_called_best(problem, placement),
        loss=loss,
        listing_s=listed - started,
        placing_s=placed - listed,
    )


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


def run(kind: Kind, problems: int, first: int = 0, kept: KeptRows | None = None) -> list[Verdict]:
    """Return the verdicts over so many problems of a kind."""
    kept = kept or KeptRows(None)
    rows = [
        kept.get_or_make(f"{kind} {seed}", partial(_judge_drawn, kind, seed)) for seed in range(first, first + problems)
    ]
    return [Verdict(**row) for row in rows]


def _judge_drawn(kind: Kind, seed: int) -> Row:
    return asdict(judge(draw_problem(kind, seed)))


def _row(kind: Kind, found: Sequence[Verdict]) -> str:
    compared = [one for one in found if not one.too_large]
    losses = [one.loss for one in compared if one.loss > _LITTLE]
    told = f"{statistics.median(losses):.1%}, {max(losses):.1%}" if losses else ""
    counts = (len(compared), sum(one.unsound for one in found), sum(one.false_bound for one in found))
    return (
        f"{kind:12}{counts[0]:9}{counts[1]:9}{counts[2]:14}{sum(one.loss < -_LITTLE for one in compared):12}"
        f"{len(losses):10}{told:>16}{sum(one.untold for one in found):8}"
        f"{sum(one.listing_s for one in found):11.0f}{sum(one.placing_s for one in found):11.0f}"
    )


def main() -> int:
    """Print a line a kind; 1 where a map or a bound is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=100, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--keep", type=Path, help="file of what was found, to go on from")
    chosen = parser.parse_args()
    kept, wrong = KeptRows(chosen.keep), 0
    print(
        f"{'kind':12}{'compared':>9}{'unsound':>9}{'false bounds':>14}{'above best':>12}{'not best':>10}"
        f"{'median, most':>16}{'untold':>8}{'listing s':>11}{'placing s':>11}"
    )
    for kind in KINDS:
        if kind in chosen.kinds.split(","):
            found = run(kind, chosen.problems, chosen.first, kept)
            print(_row(kind, found))
            sys.stdout.flush()
            wrong += sum(one.unsound or one.false_bound or one.untold or one.loss < -_LITTLE for one in found)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
