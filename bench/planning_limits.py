"""Random plans in a hurry: `optimal` with a time limit beside the best of the quick policies.

    python -m bench.planning_limits [--problems N] [--first SEED] [--limits 1,2,5,30] [--profile FILE] [--queues]

Half of the problems are drawn from iGniter's published workloads (its model of interference, batches within half of the
SLO), half from the thesis's V100 profiles that ship with gpuprof (queues). With ``--queues`` all are of iGniter's
workloads, by the 99th percentile of their queues. Each line is `gpuprof place` in processes of
its own: the seed, how many demands there are, what the best quick policy leaves unserved and how many devices it takes,
and the same of `optimal` at each limit. The last line counts the plans that are worse than the best quick policy.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.igniter_profiles import DEVICE, table_3
from bench.planning_scale import PROFILE
from gpuprof.domain.catalogue import datasets

#: Those that need no MIG, which a V100 lacks.
QUICK = ("igniter", "gslice", "gpulet", "ffd", "alpaserve", "shepherd")
_CHECKOUT = Path(__file__).parents[1]
_MOST_DEMANDS = 40
_THESIS = "v100_profiles.csv"
_ROUNDING = 1e-6

#: What a plan leaves unserved in requests/s, and the devices that it takes: less is better, the first above all.
Value = tuple[float, int]


def main() -> int:
    """Print a line for each problem; return 1 where a plan is worse than the best quick policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="seed of the first problem")
    parser.add_argument("--limits", default="1,2,5,30", help="seconds")
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--queues", action="store_true", help="iGniter's workloads alone, by queues")
    given = parser.parse_args()
    limits = [float(one) for one in given.limits.split(",")]
    worse = searches = 0
    with tempfile.TemporaryDirectory(prefix="gpuprof-limits-") as made:
        directory = Path(made)
        _start(["db", "import", str(given.profile.resolve()), "--db", "igniter-db"], directory)
        _start(["db", "import", str(datasets() / _THESIS), "--db", "thesis-db"], directory)
        for seed in range(given.first, given.first + given.problems):
            count, rules = _draw(seed, directory, queues=given.queues)
            best = min(_place(name, None, rules, directory) for name in QUICK)
            found = [_place("optimal", limit, rules, directory) for limit in limits]
            worse += sum(one > best for one in found)
            searches += len(found)
            said = "  ".join(f"{limit:g} s: {_say(one)}" for limit, one in zip(limits, found, strict=True))
            print(f"seed {seed}, {count} demands  quick: {_say(best)}  {said}", flush=True)
    print(f"{worse} of {searches} plans are worse than the best quick policy")
    return int(worse > 0)


def _draw(seed: int, directory: Path, *, queues: bool) -> tuple[int, list[str]]:
    """Write the demands of a problem; return how many there are and the options that pose it."""
    draw = random.Random(seed)
    is_igniter = queues or seed % 2 == 1
    rows = list(_draw_igniter(draw) if is_igniter else _draw_thesis(draw))
    (directory / "slo.csv").write_text("\n".join(["service,model,rate_rps,slo_ms", *rows]) + "\n", encoding="utf-8")
    if is_igniter:
        budget = [] if queues else ["--latency-budget", "0.5"]
        return len(rows), ["--estimator", "igniter", *budget, "--gpus", DEVICE, "--db", "igniter-db"]
    return len(rows), ["--gpus", "v100", "--db", "thesis-db"]


def _draw_igniter(draw: random.Random) -> Iterator[str]:
    models, originals = table_3()
    for number in range(draw.randint(3, _MOST_DEMANDS)):
        one = draw.choice(originals)
        rate, slo = one.rate_rps * draw.uniform(0.2, 1.5), one.slo.latency_ms * draw.uniform(0.7, 2.0)
        yield f"s{number},{models[one.model]},{rate:.4g},{slo:.4g}"


def _draw_thesis(draw: random.Random) -> Iterator[str]:
    with (datasets() / _THESIS).open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["latency_s"] and row["throughput_rps"]]
    for number in range(draw.randint(3, _MOST_DEMANDS // 2)):
        row = draw.choice(rows)
        ms = 1000.0 * float(row["latency_s"])
        rate = draw.uniform(0.01, 1.5) * float(row["throughput_rps"])
        yield f"s{number},{row['model']},{rate:.4g},{ms * draw.uniform(1.5, 10.0):.4g}"


def _say(value: Value) -> str:
    left = f" ({value[0]:.3g}/s left)" if value[0] else ""
    return f"{value[1]}{left}"


def _place(policy: str, limit: float | None, rules: Sequence[str], directory: Path) -> Value:
    limited = [] if limit is None else ["--time-limit", f"{limit:g}"]
    _start(["place", "--policy", policy, *rules, *limited, "--slo-file", "slo.csv", "-o", "map.json"], directory)
    content = json.loads((directory / "map.json").read_text(encoding="utf-8"))
    left = sum(one["rate_rps"] for one in content["unplaced"])
    return (left if left > _ROUNDING else 0.0), content["predicted"]["gpus"]


def _start(command: Sequence[str], directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(_CHECKOUT)}
    started = [sys.executable, "-m", "gpuprof", *command]
    done = subprocess.run(started, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: some demand is not served
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main())
