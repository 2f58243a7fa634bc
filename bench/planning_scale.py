"""Plans of many demands of few classes in a hurry: iGniter's twelve workloads, copied, and mixes drawn from them.

Each line is `gpuprof place --policy optimal --estimator igniter` in a process of its own, on iGniter's published
profile of a V100, with a time limit: the seconds on the clock, the devices of the map, the bound that it says, how far
that is below, and the devices of the policy `igniter`. Mixes are of some of the twelve, at other rates, with other
SLOs, in other numbers. With ``--distinct`` as many demands as it says, all different, are planned by the 99th
percentile of their queues in place of half of the SLO for a batch.

    python -m bench.planning_scale [--profile config.jsonl] [--limits 1,5,30] [--mixes 3] [--first SEED]
    python -m bench.planning_scale --copies 0 --limits 5 --distinct 100 --mixes 3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.igniter_profiles import DEVICE, table_3
from gpuprof.domain.demand import Demand, Slo

PROFILE = Path("../shared/reference/igniter_v100/config.jsonl")
_CHECKOUT = Path(__file__).parents[1]
#: So often are the twelve copied, and drawn classes at least and at most.
COPIES = 84
_DRAWN = (20, 120)
_FACTORS = (0.7, 2.0)
_HALF = ("--latency-budget", "0.5")
#: Models by the demands' names, and the demands.
Mix = tuple[dict[str, str], tuple[Demand, ...]]
_WIDTHS = (18, 9, 9, 9, 7, 8, 9)


def main() -> None:
    """Print a line for each mix and limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--limits", default="1,5,30", help="seconds")
    parser.add_argument("--copies", type=int, default=COPIES, help="of the twelve; 0: mixes alone")
    parser.add_argument("--mixes", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="seed of the first mix")
    parser.add_argument("--distinct", type=int, default=0, help="demands of a mix, all different, by queues")
    given = parser.parse_args()
    limits = [float(one) for one in given.limits.split(",")]
    seeds = range(given.first, given.first + given.mixes)
    mixes = [] if given.distinct else [_draw_mix(seed) for seed in seeds]
    for line in list_lines(given.profile, limits, [*([table_3(given.copies)] if given.copies else []), *mixes]):
        print(line, flush=True)
    if given.distinct:
        distinct = [_draw_distinct(given.distinct, seed) for seed in seeds]
        for line in list_lines(given.profile, limits, distinct, rules=()):
            print(line, flush=True)


def list_lines(
    profile: Path, limits: Sequence[float], mixes: Sequence[Mix], rules: Sequence[str] = _HALF
) -> Iterator[str]:
    """Yield a heading and a line for each mix and limit, planned by these options of the command line."""
    head = ("workloads, classes", "limit s", "clock s", "devices", "bound", "gap", "igniter")
    yield "".join(f"{one:>{width}}" for one, width in zip(head, _WIDTHS, strict=True))
    with tempfile.TemporaryDirectory(prefix="gpuprof-scale-") as made:
        directory = Path(made)
        _start(["db", "import", str(profile.resolve()), "--db", "db"], directory)
        for models, demands in mixes:
            rows = [f"{one.model},{models[one.model]},{one.rate_rps:g},{one.slo.latency_ms:g}" for one in demands]
            text = "\n".join(["service,model,rate_rps,slo_ms", *rows]) + "\n"
            (directory / "slo.csv").write_text(text, encoding="utf-8")
            classes = len({(models[one.model], one.rate_rps, one.slo) for one in demands})
            quick = _place("igniter", None, directory, rules)
            for limit in limits:
                yield _line(f"{len(demands)} of {classes}", limit, directory, rules, quick["gpus"])


def _draw_mix(seed: int) -> Mix:
    """Return some of the twelve, each so many times, at a rate and an SLO of its own."""
    draw = random.Random(seed)
    models, originals = table_3()
    named, demands = {}, []
    for original in draw.sample(originals, draw.randint(4, len(originals))):
        varied = _vary(draw, original, original.model)
        for copy in range(draw.randint(*_DRAWN)):
            name = f"{original.model}#{copy}"
            named[name] = models[original.model]
            demands.append(replace(varied, model=name))
    return named, tuple(demands)


def _draw_distinct(count: int, seed: int) -> Mix:
    """Return so many demands of the twelve's models, each at a rate and an SLO of its own."""
    draw = random.Random(seed)
    models, originals = table_3()
    named, demands = {}, []
    for number in range(count):
        original = draw.choice(originals)
        named[f"D{number}"] = models[original.model]
        demands.append(_vary(draw, original, f"D{number}"))
    return named, tuple(demands)


def _vary(draw: random.Random, original: Demand, name: str) -> Demand:
    rate = float(f"{original.rate_rps * draw.uniform(0.4, 1.3):.4g}")
    slo = Slo(float(f"{original.slo.latency_ms * draw.uniform(*_FACTORS):.4g}"))
    return replace(original, model=name, rate_rps=rate, slo=slo)


def _line(name: str, limit: float, directory: Path, rules: Sequence[str], quick: int) -> str:
    began = time.perf_counter()
    found = _place("optimal", limit, directory, rules)
    took = time.perf_counter() - began
    gpus, bound = found["gpus"], found["lower_bound_gpus"]
    cells = (name, f"{limit:g}", f"{took:.1f}", gpus, bound, f"{gpus / bound - 1.0:.1%}" if bound else "", quick)
    return "".join(f"{one:>{width}}" for one, width in zip(cells, _WIDTHS, strict=True))


def _place(policy: str, limit: float | None, directory: Path, rules: Sequence[str]) -> dict[str, int]:
    """Return what the map of a policy predicts of the whole."""
    given = ["--estimator", "igniter", "--gpus", DEVICE, "--db", "db", "-o", "map.json", "--slo-file", "slo.csv"]
    limited = [] if limit is None else ["--time-limit", f"{limit:g}"]
    _start(["place", "--policy", policy, *given, *rules, *limited], directory)
    content = json.loads((directory / "map.json").read_text(encoding="utf-8"))
    return dict(content["predicted"])


def _start(command: Sequence[str], directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(_CHECKOUT)}
    started = [sys.executable, "-m", "gpuprof", *command]
    subprocess.run(started, cwd=directory, env=environment, capture_output=True, check=True)


if __name__ == "__main__":
    main()
