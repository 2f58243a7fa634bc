"""Times what a newcomer types first: --help, and profile, estimate and place on ResNet-50.

    python -m bench.first_steps [--repeats N]

Prints medians. Cold: a new process each time, as a person waits for it. Warm: inside one process, as a library user
sees it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SLO = "model,rate_rps,slo_ms\nresnet50,{rate},{slo}\n"


def main() -> int:
    """Print one line a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        line("gpuprof --help, cold", median_s(lambda: command(out, "--help"), repeats))
        line(
            "zoo build resnet50, cold",
            median_s(lambda: command(out, "zoo", "build", "resnet50", "-o", "resnet50.onnx"), 1),
        )
        profile = ["profile", "resnet50.onnx", "--batch", "1,2,4,8"]
        line("profile at batch 1,2,4,8, cold", median_s(lambda: command(out, *profile), 1))
        line("profile again (all of it known), cold", median_s(lambda: command(out, *profile), repeats))
        write_slo(out)
        steps = {
            "estimate at a measured batch": ["estimate", "resnet50", "--batch", "8"],
            "estimate at a batch between": ["estimate", "resnet50", "--batch", "6"],
            "estimate from the file for an A100": ["estimate", "resnet50.onnx", "--batch", "32", "--device", "a100-80"],
            "place one demand": ["place", "--slo-file", "slo.csv", "-o", "map.json"],
        }
        for name, words in steps.items():
            line(f"{name}, cold", median_s(lambda words=words: command(out, *words), repeats))  # type: ignore[misc]
        os.chdir(out)
        for name, words in steps.items():
            line(f"{name}, warm", median_s(lambda words=words: inside(words), repeats))  # type: ignore[misc]
    return 0


def line(name: str, seconds: float) -> None:
    """Print one figure."""
    print(f"{name:45s} {1000 * seconds:10.1f} ms", flush=True)


def median_s(step: Callable[[], object], repeats: int) -> float:
    """Return the median time of a step in seconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def command(out: Path, *words: str) -> None:
    """Run one command in a new process."""
    done = subprocess.run([sys.executable, "-m", "gpuprof", *words], cwd=out, capture_output=True, check=False)
    if done.returncode not in (0, 2):  # 2: measured, but on a noisy machine
        raise SystemExit(done.stderr.decode())


def inside(words: list[str]) -> None:
    """Run one command in this process."""
    from gpuprof.cli.main import main as gpuprof

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = gpuprof(words)
    if code:
        raise SystemExit(f"gpuprof {' '.join(words)} ended with {code}")


def write_slo(out: Path) -> None:
    """Ask for what the machine can do with ease: a fifth of its rate at batch 1, ten times its latency."""
    import json

    words = [sys.executable, "-m", "gpuprof", "estimate", "resnet50", "--batch", "1", "--json"]
    (row,) = json.loads(subprocess.run(words, cwd=out, capture_output=True, check=True).stdout)
    latency_ms = row["latency_ms"]
    (out / "slo.csv").write_text(SLO.format(rate=round(200.0 / latency_ms, 2), slo=round(10 * latency_ms, 1)))


if __name__ == "__main__":
    sys.exit(main())
