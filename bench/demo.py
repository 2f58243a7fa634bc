"""The demo: two convolutional networks go through the whole pipeline on this machine's CPU.

    python -m bench.demo [--out DIRECTORY] [--duration SECONDS]

Every step is a gpuprof command that is printed before it runs. Rates and objectives are set to what the machine was
just measured to be able to do, so that the demo means the same on a slow machine and on a fast one.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

MODELS = ("squeezenet", "inception_v1")
#: The rate asked for, as a part of what one replica that answers requests one by one can do.
LOAD = 0.25
#: The objective, as a multiple of the time of one request: the next where the machine was held up so often while it
#: was measured that the plan refuses the one before.
SLO_FACTORS = (12.0, 24.0, 48.0)
#: Exit code of a measurement that succeeded on a machine too noisy to trust it.
UNSTABLE = 2


def main() -> int:
    """Run every step; 0 when all of them succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where everything is written")
    parser.add_argument("--duration", type=int, default=75, help="seconds of traffic")
    options = parser.parse_args()
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "110")  # what is kept, as in the README, is read at the width of a page
    started = time.monotonic()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    run_pipeline(options.out, options.duration)
    print(f"\nAll of it took {time.monotonic() - started:.0f} s and lies in {options.out}/.")
    return 0


def run_pipeline(out: Path, duration_s: int) -> None:
    """Build, profile, estimate, place, serve and load, in ``out``."""
    title("Two networks with random weights, as ONNX files")
    for model in MODELS:
        gpuprof(out, "zoo", "build", model, "-o", f"{model}.onnx")
    files = [f"{model}.onnx" for model in MODELS]
    title("Measure them, alone on one core each")
    gpuprof(out, "profile", *files, "--batch", "1,2,4", "--share", "1core")
    title("Predict what was not measured: another batch here, and a GPU that this machine does not have")
    gpuprof(out, "estimate", "--batch", "3", "--share", "1core")
    gpuprof(out, "estimate", "squeezenet.onnx", "--batch", "32", "--device", "a100-80")
    title("Ask for what this machine can do, and let gpuprof decide how")
    plan(out)
    title("Serve the plan, send it Poisson traffic, and compare")
    serve_and_load(out, duration_s)


def plan(out: Path) -> None:
    """Place the models, with objectives that this machine can keep."""
    words = ("place", "--slo-file", "slo.csv", "--gpus", "cpu:1", "-o", "map.json")
    for factor in SLO_FACTORS[:-1]:
        write_slo(out, factor)
        if call(out, *words) == 0:
            return
        print(
            "\nThis machine was held up too often for that while it was measured: objectives twice as long, then.",
            flush=True,
        )
    write_slo(out, SLO_FACTORS[-1])
    gpuprof(out, *words)


def write_slo(out: Path, factor: float) -> None:
    """Write slo.csv from the measured time of one request of each model, and show it."""
    rows = json.loads(output(out, "estimate", "--batch", "1", "--share", "1core", "--json"))
    with (out / "slo.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "rate_rps", "slo_ms"])
        for row in rows:
            rate = LOAD * 1000.0 / row["latency_ms"]
            writer.writerow([row["model"], f"{rate:.0f}", f"{factor * row['latency_ms']:.0f}"])
    print((out / "slo.csv").read_text(), end="", flush=True)


def serve_and_load(out: Path, duration_s: int) -> None:
    """Start the server, wait until it is ready, send traffic, and stop it as Ctrl-C does."""
    port = free_port()
    words = ["serve", "map.json", "--port", str(port)]
    announce(words, " &")
    server = subprocess.Popen([sys.executable, "-m", "gpuprof", *words], cwd=out)
    try:
        wait_until_ready(server, port)
        url = f"http://127.0.0.1:{port}"
        gpuprof(out, "load", url, "--map", "map.json", "--duration", str(duration_s), "--verbose", "--no-fail")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def wait_until_ready(server: subprocess.Popen[bytes], port: int, limit_s: float = 60.0) -> None:
    """Return when the server says that it is ready."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gpuprof(out: Path, *words: str) -> None:
    """Print and run one command in ``out``, and end where it fails."""
    code = call(out, *words)
    if code == UNSTABLE:
        print("This machine is busy with other things: expect the last table to differ more than it otherwise would.")
    elif code:
        raise SystemExit(code)


def call(out: Path, *words: str) -> int:
    """Print and run one command in ``out``, and return its exit code."""
    announce(words)
    return subprocess.run([sys.executable, "-m", "gpuprof", *words], cwd=out, check=False).returncode


def output(out: Path, *words: str) -> str:
    """Return what one command prints."""
    completed = subprocess.run([sys.executable, "-m", "gpuprof", *words], cwd=out, check=True, stdout=subprocess.PIPE)
    return completed.stdout.decode()


def announce(words: list[str] | tuple[str, ...], end: str = "") -> None:
    """Print a command as a person would type it."""
    print(f"\n$ gpuprof {shlex.join(words)}{end}", flush=True)


def title(text: str) -> None:
    """Print what comes next."""
    print(f"\n── {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
