"""Prints the figures of placement: the papers' plans, what `optimal` makes of them, and how long it takes.

    python -m bench.placement [--reference DIRECTORY] [--only NAME]
    python -m bench.placement --only random --demands 500 [--seed S] [--keep FILE] [--minutes M]

The measurements that ParvaGPU's and iGniter's authors published belong to them: put `prof_data` and `SLO` of
https://github.com/MunQ-Lee/ParvaGPU_SC24 into DIRECTORY/parvagpu_a100, and `config.jsonl` (`i-Gniter/Algorithm/config`
of https://github.com/icloud-ecnu/igniter) into DIRECTORY/igniter_v100. What is not there is left out and named.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench import igniter_profiles, parvagpu_profiles, pooled_plans, usher_scale
from bench.baselines.mig_serving import MigServing
from bench.published_measurements import thesis_estimator, v100
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import evidence
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import ModelFile, Options, Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.gslice import Gslice
from gpuprof.placement.published.igniter import Igniter
from gpuprof.placement.published.milp import Milp
from gpuprof.placement.published.parvagpu import ParvaGpu
from gpuprof.placement.published.usher import Usher

_PARVAGPU_PAPER = (2, 3, 5, 7, 13, 16)
_PARVAGPU_POLICIES: tuple[Policy, ...] = (
    ParvaGpu(processes=5),
    ParvaGpu(processes=5, unoptimized=True),
    ParvaGpu(single=True),
    MigServing(),
    FirstFitDecreasing(),
    Optimal(),
)
_REPEATS = 3
_RANDOM_DEMANDS = 24


def main() -> int:
    """Run the sections; 0 when every map passed the check and every figure of a paper came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=Path("../shared/reference"), help="published measurements")
    parser.add_argument("--only", choices=sorted((*_SECTIONS, "random")), help="one section")
    parser.add_argument("--demands", type=int, default=_RANDOM_DEMANDS, help="random ones")
    parser.add_argument("--seed", type=int, default=1, help="of the random demands")
    parser.add_argument("--keep", type=Path, help="file of what was found for random demands, to go on from")
    parser.add_argument("--minutes", type=float, default=math.inf, help="to begin no more random demands after")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    sections = _SECTIONS | {
        "random": lambda _: pooled_plans.print_random(options.demands, options.seed, options.keep, options.minutes)
    }
    chosen = sections if options.only is None else {options.only: sections[options.only]}
    outcomes = [section(options.reference) for section in chosen.values()]  # every one of them, whatever came before
    return 0 if all(outcomes) else 1


def _parvagpu(reference: Path) -> bool:
    """ParvaGPU's six scenarios (Table IV): latency below 0.45 × SLO, up to five processes."""
    directory = reference / "parvagpu_a100"
    if not directory.is_dir():
        return _absent(directory)
    print("\nParvaGPU's scenarios on A100-80, GPUs        " + "".join(f"{f'S{n}':>5}" for n in range(1, 7)) + "  sum")
    print(_row("published", _PARVAGPU_PAPER))
    counts: dict[str, list[int]] = {}
    sound = True
    bounds = []
    for number in range(1, 7):
        given = _scenario(directory, number)
        for policy in _PARVAGPU_POLICIES:
            placement, ok, _ = _solve_problem(policy, given)
            counts.setdefault(placement.policy, []).append(len(placement.gpus))
            sound = sound and ok
        bounds.append(placement.lower_bound_gpus or 0)
    for name, values in counts.items():
        print(_row(name, values))
    print(_row("lower bound", bounds))
    expected = counts["parvagpu"] == list(_PARVAGPU_PAPER) and counts["optimal"] == bounds
    return _tenfold(directory) and sound and expected and sum(bounds) < sum(_PARVAGPU_PAPER)


def _tenfold(directory: Path) -> bool:
    given = _scenario(directory, 5, copies=10)
    times = []
    for _ in range(_REPEATS):
        placement, sound, seconds = _solve_problem(Optimal(), given)
        times.append(seconds)
    print(
        f"scenario 5 with every service ten times over: optimal {len(placement.gpus)} GPUs, bound "
        f"{placement.lower_bound_gpus}, {statistics.median(times):.2f} s (parvagpu "
        f"{len(ParvaGpu(processes=5).place(given).gpus)} GPUs)"
    )
    return sound


def _scenario(directory: Path, number: int, copies: int = 1) -> Problem:
    return Problem(
        demands=parvagpu_profiles.scenario(directory, number, copies),
        fleet=Fleet((FleetEntry(device("a100-80")),)),
        estimator=parvagpu_profiles.read_profiles(directory, copies),
        queueing=BatchQueue(),
        options=Options(latency_budget=0.45, max_processes=5),
    )


def _thesis(_: Path) -> bool:
    """The worked examples of Elvinger's thesis, §5.4 and §6.2.1."""
    print("\nElvinger's thesis on V100, goodput (requests/s)  policy  printed   ours")
    vision = "alexnet densenet121 efficientnet_b7 resnet50 vgg19"
    examples: list[tuple[str, str, float, float, int | None, Policy, float]] = [
        ("5.4.1 within a group", "alexnet gpt2 resnet50 t5", 400, 200, 4, Usher(), 800.0),
        ("", "alexnet gpt2 resnet50 t5", 400, 200, 4, Milp(), 1092.04),
        ("5.4.1 across groups", "resnet50 vgg19 mobilenet_v2 gpt2 bert", 400, 300, 4, Usher(), 793.57),
        ("", "resnet50 vgg19 mobilenet_v2 gpt2 bert", 400, 300, 4, Milp(), 1331.19),
        ("5.4.2 multiplier", "resnet50 alexnet mobilenet_v2 bert", 500, 200, 4, Usher(), 1500.0),
        ("", "resnet50 alexnet mobilenet_v2 bert", 500, 200, 4, Milp(), 1624.88),
        ("6.2.1 vision, six GPUs", vision, 500, 200, None, Usher(), 2500.0),
    ]
    right = True
    for name, models, rate, slo, count, policy, printed in examples:
        demands = tuple(Demand(model, rate, Slo(slo)) for model in models.split())
        fleet = Fleet((FleetEntry(v100(), count),))
        given = Problem(demands, fleet, thesis_estimator(), BatchQueue(), Options(latency_budget=1.0))
        placement, sound, _seconds = _solve_problem(policy, given)
        goodput = to_map(given, placement).predicted.goodput_rps
        right = right and sound and abs(goodput - printed) < 0.01
        print(f"  {name:46} {placement.policy:6} {printed:8.2f} {goodput:8.2f}  {_layout(placement)}")
    return right


def _igniter(reference: Path) -> bool:
    """iGniter's Table 1, the twelve workloads of Table 3, and a thousand."""
    profile = reference / "igniter_v100" / "config.jsonl"
    if not profile.is_file():
        return _absent(profile)
    print("\niGniter on V100")
    small, sound_1, _seconds = _solve_problem(Igniter(), _workloads(profile, igniter_profiles.table_1()))
    print(f"  Table 1: {_layout(small)}")
    twelve, sound_2, _seconds = _solve_problem(Igniter(), _workloads(profile, igniter_profiles.table_3()))
    print(f"  W1…W12: {len(twelve.gpus)} GPUs: {_layout(twelve)}")
    alone = len(Igniter(aware=False).place(_workloads(profile, igniter_profiles.table_3())).gpus)
    print(f"  W1…W12 by their lower bounds alone, first fit (FFD+): {alone} GPUs")
    tuned, sound_3, _seconds = _solve_problem(Gslice(), _workloads(profile, igniter_profiles.table_3()))
    print(f"  W1…W12 tuned one by one (GSLICE+, six in the paper): {len(tuned.gpus)} GPUs")
    bounded, sound_4, _seconds = _solve_problem(
        Igniter(), _workloads(profile, igniter_profiles.table_3(), bounded=True)
    )
    print(
        f"  W1…W12 with k₁ … k₅ fitted within bounds, as gpuprof does: {len(bounded.gpus)} GPUs; the six of the paper "
        "come out with the authors' unbounded fit, which the lines above use"
    )
    many = _workloads(profile, igniter_profiles.table_3(84))
    times = [_solve_problem(Igniter(), many)[2] for _ in range(_REPEATS)]
    print(f"  {len(many.demands)} workloads (W1…W12, 84 times): {statistics.median(times):.2f} s")
    shares = {r.model: r.share.sm_pct for gpu in twelve.gpus for r in gpu.replicas()}
    expected = (len(small.gpus), len(twelve.gpus), alone, shares["W4"], shares["W9"]) == (1, 6, 5, 32.5, 37.5)
    return sound_1 and sound_2 and sound_3 and sound_4 and expected


def _workloads(profile: Path, example: tuple[dict[str, str], tuple[Demand, ...]], *, bounded: bool = False) -> Problem:
    models, demands = example
    return Problem(
        demands=demands,
        fleet=Fleet((FleetEntry(device("v100")),)),
        estimator=igniter_profiles.read_estimator(profile, models, bounded=bounded),
        queueing=BatchQueue(),
        options=Options(latency_budget=0.5),
        files={name: ModelFile(None, model) for name, model in models.items()},
    )


def _usher_scale(_: Path) -> bool:
    """6,000 GPUs of four kinds, 15 million requests/s."""
    given = Problem(
        demands=usher_scale.demands(),
        fleet=usher_scale.fleet(),
        estimator=usher_scale.estimator(),
        queueing=BatchQueue(),
        options=Options(latency_budget=1.0),
    )
    times = []
    for _repeat in range(_REPEATS):
        placement, sound, seconds = _solve_problem(Optimal(), given)
        times.append(seconds)
    cost = sum(given.entry(gpu.device).price_per_hour for gpu in placement.gpus)
    bound = placement.lower_bound_cost_per_hour
    print(
        f"\nUSHER's scale (V100 profiles, other kinds scaled by float32 peak): {len(given.demands)} models, 15 million "
        f"requests/s on {len(placement.gpus)} of 6000 GPUs of four kinds, {cost:,.0f} $/h, bound "
        f"{'none' if bound is None else f'{bound:,.0f} $/h'}, unplaced {len(placement.unplaced)}, "
        f"{statistics.median(times):.2f} s"
    )
    return sound


def _fixed_and_moved(reference: Path) -> bool:
    """What `optimal` says of fleets that are too small, and how little it moves when rates change."""
    directory = reference / "parvagpu_a100"
    if not directory.is_dir():
        return _absent(directory)
    print("\nScenario 6 on fixed fleets of A100-80: goodput (requests/s), bound, least-served fraction")
    given = _scenario(directory, 6)
    sound = True
    for count in (4, 8, 12):
        small = replace(given, fleet=Fleet((FleetEntry(device("a100-80"), count),)))
        for policy in (Optimal(), Optimal(fair=True)):
            placement, ok, seconds = _solve_problem(policy, small)
            predicted = to_map(small, placement).predicted
            least = min(placement.rate_rps(one.model) / one.rate_rps for one in small.demands)
            bound = predicted.upper_bound_goodput_rps or 0.0
            sound = sound and ok and predicted.goodput_rps <= bound * (1.0 + 1e-6)
            name = "fair" if policy.fair else "most"
            print(f"  {count:2} GPUs, {name}: {predicted.goodput_rps:8.0f} {bound:8.0f} {least:6.3f}  {seconds:.2f} s")
    before = to_map(given, Optimal().place(given))
    for factor in (1.0, 0.97, 1.03):
        demands = tuple(replace(one, rate_rps=one.rate_rps * factor) for one in given.demands)
        changed = replace(given, demands=demands, previous=before)
        placement, ok, _seconds = _solve_problem(Optimal(), changed)
        after = to_map(changed, placement)
        total = sum(1 for _ in after.places())
        sound = sound and ok and (factor != 1.0 or after.predicted.moves == 0)
        moves = f"{after.predicted.moves} of {total} move"
        print(f"  rates times {factor:g} from its own map: {len(placement.gpus)} GPUs, {moves}")
    return sound


def _solve_problem(policy: Policy, given: Problem) -> tuple[Placement, bool, float]:
    started = time.perf_counter()
    placement = policy.place(given)
    seconds = time.perf_counter() - started
    broken = check(to_map(given, placement), evidence(given))
    for violation in broken[:3]:
        print(f"  NOT SOUND: {violation}")
    return placement, not broken, seconds


def _layout(placement: Placement) -> str:
    return " | ".join(
        " ".join(f"{r.model}({r.share.sm_pct:g}%, {r.batch})" for r in gpu.replicas()) for gpu in placement.gpus
    )


def _row(name: str, values: Sequence[int]) -> str:
    return f"  {name:42} " + "".join(f"{value:5}" for value in values) + f"{sum(values):5}"


def _absent(path: Path) -> bool:
    print(f"\nleft out: {path} is not there (see --help for where it comes from)", file=sys.stderr)
    return True


_SECTIONS: dict[str, Callable[[Path], bool]] = {
    "parvagpu": _parvagpu,
    "thesis": _thesis,
    "igniter": _igniter,
    "scale": _usher_scale,
    "fixed": _fixed_and_moved,
    "papers": pooled_plans.print_papers,
}

if __name__ == "__main__":
    sys.exit(main())
