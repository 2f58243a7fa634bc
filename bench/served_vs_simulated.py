"""Served against simulated: the same map, the same arrivals, once with real workers and once in simulated time.

    python -m bench.served_vs_simulated [--out DIRECTORY] [--models A,B] [--seconds SECONDS] [--loads FRACTIONS]
        [--repeats N] [--keep]

Two networks are profiled on this machine's CPU and placed one to a core. For each load (a part of what their replicas
can do) one trace is made, sent to ``gpuprof serve`` by ``gpuprof load``, and given to ``gpuprof simulate``. Goodput is
to agree within 5%, p99 within 15%. The simulator is told nothing of the server but the map: the measured batch times,
their spread, how much slower a batch is after a pause, and what serving costs. With ``--repeats`` each trace is sent
so often; the median is compared, and the least and the largest p99 tell how far two runs of the same requests are
apart. The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.demo import MODELS, free_port, gpuprof, output, title, wait_until_ready

LOADS = (0.3, 0.6, 0.8)
#: Rate of the plan, as a part of what a replica can do one by one: low, so that nothing is batched.
_PLANNED = 0.25
_SLO_FACTOR = 12.0
_WARMUP_S = 2.0
GOODPUT_WITHIN_PCT, P99_WITHIN_PCT = 5.0, 15.0

Row = Mapping[str, Any]


def main() -> int:
    """Prepare, run every load both ways, print the comparison; 0 when everything agrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("served-out"), help="where everything is written")
    parser.add_argument("--seconds", type=float, default=40.0, help="of traffic at each load")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="parts of the capacity")
    parser.add_argument("--models", default=",".join(MODELS), help="two networks of the zoo")
    parser.add_argument("--repeats", type=int, default=1, help="times that each trace is sent")
    parser.add_argument("--keep", action="store_true", help="use the map that is there already")
    options = parser.parse_args()
    out: Path = options.out
    if not options.keep:
        prepare(out, options.models.split(","))
    capacities = capacities_of(out / "map.json")
    loads = [float(text) for text in options.loads.split(",")]
    rows = serve_all(out, capacities, loads, options.seconds, options.repeats)
    title("Simulated against served")
    return 0 if print_comparison(rows) else 1


def prepare(out: Path, models: Sequence[str]) -> None:
    """Build and profile the models, and place them."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    title("Two networks, measured alone on one core each, and placed")
    for model in models:
        gpuprof(out, "zoo", "build", model, "-o", f"{model}.onnx")
    gpuprof(out, "profile", *(f"{model}.onnx" for model in models), "--batch", "1", "--share", "1core")
    with (out / "slo.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "rate_rps", "slo_ms"])
        for row in json.loads(output(out, "estimate", "--batch", "1", "--share", "1core", "--json")):
            writer.writerow([row["model"], _PLANNED * 1000.0 / row["latency_ms"], _SLO_FACTOR * row["latency_ms"]])
    gpuprof(out, "place", "--slo-file", "slo.csv", "--gpus", "cpu:1", "-o", "map.json")


def capacities_of(map_file: Path) -> dict[str, float]:
    """Return the requests per second that the replicas of each model can do."""
    capacities: dict[str, float] = {}
    for node in json.loads(map_file.read_text())["nodes"]:
        for replica in (r for gpu in node["gpus"] for part in gpu["partitions"] for r in part["replicas"]):
            full_ms = (replica["batch_latency_ms"] or [replica["predicted"]["latency_ms"]])[-1]
            rate = 1000.0 * replica["batch"] * replica["processes"] / full_ms
            capacities[replica["model"]] = capacities.get(replica["model"], 0.0) + rate
    return capacities


def serve_all(
    out: Path, capacities: Mapping[str, float], loads: Sequence[float], seconds: float, repeats: int
) -> list[tuple[float, list[Row], Row]]:
    """Serve the map, send each load, and simulate it; return (load, served runs, simulated) by load and model."""
    rows = []
    for load in loads:
        title(f"{100 * load:.0f}% load")
        make_trace(out, {model: load * rate for model, rate in capacities.items()}, seconds)
        runs = [serve_one(out) for _ in range(repeats)]
        gpuprof(out, "simulate", "map.json", "--trace", "trace.csv", "-o", "sim.json", "--no-fail")
        simulated = {row["model"]: row for row in json.loads((out / "sim.json").read_text())["models"]}
        rows += [(load, list(served), simulated[served[0]["model"]]) for served in zip(*runs, strict=True)]
    return rows


def make_trace(out: Path, rates: Mapping[str, float], seconds: float) -> None:
    """Write the arrivals of one load."""
    words = [word for model, rate in rates.items() for word in ("--rate", f"{model}={rate:.6g}")]
    gpuprof(out, "trace", "make", *words, "--duration", f"{seconds:g}s", "-o", "trace.csv")


def serve_one(out: Path) -> list[Row]:
    """Start a server, replay the trace, stop it; return what the clients measured."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "gpuprof", "serve", "map.json", "--port", str(port)], cwd=out)
    try:
        wait_until_ready(server, port)
        time.sleep(1.0)
        gpuprof(
            out, "load", f"http://127.0.0.1:{port}", "--map", "map.json", "--trace", "trace.csv",
            "--warmup", f"{_WARMUP_S:g}", "-o", "load.json",
        )  # fmt: skip
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
    report: Any = json.loads((out / "load.json").read_text())
    rows: list[Row] = report if isinstance(report, list) else report["models"]
    return rows


def print_comparison(rows: Sequence[tuple[float, Sequence[Row], Row]]) -> bool:
    """Print each model at each load, and return whether all agree."""
    print("load  model                requests/s  goodput served, simulated        p50 ms             p99 ms")
    good = True
    for load, runs, simulated in rows:
        served = sorted(runs, key=lambda run: float(run["p99_ms"] or 0.0))[len(runs) // 2]
        goodput, p99 = off_pct(simulated, served, "goodput_rps"), off_pct(simulated, served, "p99_ms")
        fits = abs(goodput) <= GOODPUT_WITHIN_PCT and abs(p99) <= P99_WITHIN_PCT
        good &= fits
        print(
            f"{100 * load:3.0f}%  {served['model']:19s} {served['rate_rps']:10.1f}  "
            f"{served['goodput_rps']:8.1f} {simulated['goodput_rps']:8.1f} {goodput:+6.1f}%  "
            f"{served['p50_ms']:7.1f} {simulated['p50_ms']:7.1f}  "
            f"{served['p99_ms']:7.1f} {simulated['p99_ms']:7.1f} {p99:+6.1f}%  "
            f"{spread(runs)}{'' if fits else 'DIFFERS'}"
        )
    print(f"asked: goodput within {GOODPUT_WITHIN_PCT:g}%, p99 within {P99_WITHIN_PCT:g}%")
    return good


def spread(runs: Sequence[Row]) -> str:
    """Return the least and the largest p99 of several runs."""
    p99_ms = [float(run["p99_ms"] or 0.0) for run in runs]
    return f"({min(p99_ms):.1f} to {max(p99_ms):.1f} in {len(p99_ms)} runs) " if len(p99_ms) > 1 else ""


def off_pct(simulated: Row, served: Row, key: str) -> float:
    """Return how far the simulated figure is off the served one, in percent."""
    return float(100.0 * (simulated[key] / served[key] - 1.0)) if served[key] else float("inf")


if __name__ == "__main__":
    sys.exit(main())
