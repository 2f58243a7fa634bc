"""Random plans in a hurry: `optimal` with a time limit beside the best of the quick policies without one.

    python -m bench.planning_limits [--problems N] [--first SEED] [--limits 1,2,5,30] [--profile FILE] [--queues]

By turns the problems are drawn from the thesis's V100 profiles that ship with gpuprof (queues), from iGniter's
published workloads (its model of interference, batches within half of the SLO), and of up to four networks of the zoo
of which nothing was measured, on fleets that may be too small. With ``--queues`` all are of iGniter's workloads, by
the 99th percentile of their queues. Each line is `gpuprof place` in processes of its own: the seed, how many demands
there are, what the best quick policy leaves unserved and how many devices it takes, and the same of `optimal` at each
limit, with a star where the map names policies that the limit ended. The last lines count the plans that are worse
than the best quick policy, and those among them that do not say so.
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
from typing import NamedTuple

from bench.igniter_profiles import DEVICE, table_3
from bench.planning_scale import PROFILE
from gpuprof.domain.catalogue import datasets

#: Those that need no MIG, which a V100 lacks.
QUICK = ("igniter", "gslice", "gpulet", "ffd")
#: Those that plan with MIG.
_WITH_MIG = ("parvagpu",)
_CHECKOUT = Path(__file__).parents[1]
_MOST_DEMANDS = 40
_THESIS = "v100_profiles.csv"
_ROUNDING = 1e-6

#: Networks and GPUs of the problems of which nothing was measured.
_NETWORKS = (
    "resnet50",
    "densenet121",
    "inception_v2",
    "shufflenet",
    "squeezenet",
    "mlp",
    "unet",
    "transformer_encoder",
)
_FLEETS = ("t4:1", "t4:2", "l4", "t4,l4,a10", "t4:1,l4:1,a10:1", "v100:2", "a100-40:1")


class Value(NamedTuple):
    """What a plan leaves unserved in requests/s, what it costs and takes: less is better, the first above all."""

    left_rps: float
    cost_per_hour: float
    gpus: int
    names_unfinished: bool = False  #: Whether the map names policies that the time limit ended.


class _Problem(NamedTuple):
    demands: int
    rules: list[str]  #: Options that pose it.
    quick: tuple[str, ...]


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
    worse = unsaid = searches = 0
    with tempfile.TemporaryDirectory(prefix="gpuprof-limits-") as made:
        directory = Path(made)
        _start(["db", "import", str(given.profile.resolve()), "--db", "igniter-db"], directory)
        _start(["db", "import", str(datasets() / _THESIS), "--db", "thesis-db"], directory)
        for name in () if given.queues else _NETWORKS:
            _start(["zoo", "build", name, "-o", f"{name}.onnx"], directory)
        for seed in range(given.first, given.first + given.problems):
            posed = _draw(seed, directory, queues=given.queues)
            best = min(_place(name, None, posed.rules, directory) for name in posed.quick)
            found = [_place("optimal", limit, posed.rules, directory) for limit in limits]
            behind = [one for one in found if _is_worse(one, best)]
            worse, searches = worse + len(behind), searches + len(found)
            unsaid += sum(not one.names_unfinished for one in behind)
            said = "  ".join(f"{limit:g} s: {_say(one)}" for limit, one in zip(limits, found, strict=True))
            print(f"seed {seed}, {posed.demands} demands  quick: {_say(best)}  {said}", flush=True)
    print(f"{worse} of {searches} plans are worse than the best quick policy")
    print(f"{unsaid} of them do not say that the limit ended quick policies")
    return int(worse > 0)


def _is_worse(one: Value, best: Value) -> bool:
    return (round(one.left_rps, 3), round(one.cost_per_hour, 6)) > (
        round(best.left_rps, 3),
        round(best.cost_per_hour, 6),
    )


def _draw(seed: int, directory: Path, *, queues: bool) -> _Problem:
    """Write the demands of a problem, and return how it is posed."""
    draw = random.Random(seed)
    kind = 1 if queues else seed % 3
    rows = list((_draw_thesis, _draw_igniter, _draw_networks)[kind](draw))
    (directory / "slo.csv").write_text("\n".join(["service,model,rate_rps,slo_ms", *rows]) + "\n", encoding="utf-8")
    if kind == 1:
        budget = [] if queues else ["--latency-budget", "0.5"]
        rules = ["--estimator", "igniter", *budget, "--gpus", DEVICE, "--db", "igniter-db"]
        return _Problem(len(rows), rules, QUICK)
    if kind == 0:
        return _Problem(len(rows), ["--gpus", "v100", "--db", "thesis-db"], QUICK)
    fleet = draw.choice(_FLEETS)
    quick = (*QUICK, *_WITH_MIG) if fleet.startswith("a100") else QUICK
    return _Problem(len(rows), ["--gpus", fleet], quick)


def _draw_networks(draw: random.Random) -> Iterator[str]:
    for number, name in enumerate(draw.sample(_NETWORKS, draw.randint(1, 4))):
        yield f"s{number},{name}.onnx,{10 ** draw.uniform(1.0, 3.4):.4g},{10 ** draw.uniform(0.7, 2.4):.4g}"


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
    left = f" ({value.left_rps:.4g}/s left)" if value.left_rps else ""
    return f"{value.gpus}{left}{'*' if value.names_unfinished else ''}"


def _place(policy: str, limit: float | None, rules: Sequence[str], directory: Path) -> Value:
    limited = [] if limit is None else ["--time-limit", f"{limit:g}"]
    options = [*rules, *limited, "--slo-file", "slo.csv", "--best-effort", "-o", "map.json"]
    _start(["place", "--policy", policy, *options], directory)
    content = json.loads((directory / "map.json").read_text(encoding="utf-8"))
    left = sum(one["rate_rps"] for one in content["unplaced"])
    predicted, stopped_by = content["predicted"], content["planned_with"].get("stopped_by") or ""
    cost = predicted["cost_per_hour"] or predicted["gpus"]
    return Value(left if left > _ROUNDING else 0.0, cost, predicted["gpus"], "were done" in stopped_by)


def _start(command: Sequence[str], directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(_CHECKOUT)}
    started = [sys.executable, "-m", "gpuprof", *command]
    done = subprocess.run(started, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: some demand is not served
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main())
