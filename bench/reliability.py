"""Does to a server what it must survive, and prints how it did: dying workers under load, and three times its capacity.

    python -m bench.reliability [--seconds S] [--model null:600k]

A worker is killed with SIGKILL while the server has 80% of the load that it bears, after a quarter of the time. Under
three times the capacity of simulated workers, goodput is to stay at 90% of the capacity, and what is accepted within
its SLO.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench.serving import closed_loop, deployment, server
from gpuprof.serving.load import LoadSettings, Stream, run_load
from gpuprof.serving.load_client import LoadClient, Schedule, Sent
from gpuprof.serving.load_report import ModelResult
from gpuprof.serving.load_target import Target, requests_for
from gpuprof.serving.traffic import arrival_times

#: Part of the measured peak that is sent while a worker dies.
LOAD = 0.8
#: After so long the latency must be what it was.
RECOVERY_S = 5.0
_CONCURRENCY = 8
#: Longer than the SLO of the map: what has no answer by then is lost, and not only late.
_PATIENCE_S = 90.0


@dataclass(frozen=True)
class Killed:
    """What became of a load during which a worker was killed; latencies in ms at the 99th percentile.

    ``lag_ms`` is how late the client itself sent: where it is not small, the latencies are the client's.
    """

    peak_rps: float
    rate_rps: float
    sent: int
    answered: int
    refused: int
    failed: int
    lost: int
    before_ms: float
    meanwhile_ms: float
    after_ms: float
    lag_ms: float


def killed_under_load(model: str, seconds: float) -> Killed:
    """Measure the peak of two workers, send `LOAD` of it, and kill a worker after a quarter of the time."""
    with server(model, 2) as (process, port):
        peak_rps = closed_loop(process, port, _CONCURRENCY, min(3.0, seconds / 3.0)).rate_rps
        rate_rps = LOAD * peak_rps
        times = arrival_times("poisson", rate_rps, seconds, 0).tolist()
        requests = requests_for(Target("127.0.0.1", port), "m", None, 0)
        schedule = Schedule("127.0.0.1", port, (requests,), times, [0] * len(times), patience_s=_PATIENCE_S)
        start = time.monotonic() + 0.2
        kill = threading.Timer(0.2 + seconds / 4.0, _workers(process)[0].kill)
        kill.start()
        sent = LoadClient(schedule).run(start)
        kill.join()
    return _told(schedule.times, sent, peak_rps, rate_rps, seconds / 4.0)


def _workers(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if "gpuprof.serving.worker" in child.cmdline()]


def _told(times: Sequence[float], sent: Sent, peak_rps: float, rate_rps: float, killed_s: float) -> Killed:
    due, done, status = np.asarray(times), np.asarray(sent.done_s), np.asarray(sent.status)
    latency_ms = 1000.0 * (done - due)

    def p99(begin_s: float, end_s: float) -> float:
        own = latency_ms[(due >= begin_s) & (due < end_s) & (status == 200)]
        return float(np.quantile(own, 0.99)) if len(own) else float("nan")

    recovered_s = killed_s + RECOVERY_S
    return Killed(
        peak_rps=peak_rps,
        rate_rps=rate_rps,
        sent=len(due),
        answered=int((status == 200).sum()),
        refused=int((status == 503).sum()),
        failed=int(((status != 200) & (status != 503) & (status != 0)).sum()),
        lost=int((status == 0).sum()),
        before_ms=p99(0.0, killed_s),
        meanwhile_ms=p99(killed_s, recovered_s),
        after_ms=p99(recovered_s, float("inf")),
        lag_ms=float(1000.0 * np.quantile(np.asarray(sent.sent_s) - due, 0.99)),
    )


def overloaded(times: float, seconds: float) -> tuple[float, ModelResult]:
    """Send ``times`` the capacity to a simulated worker; return the capacity in requests/s and what came of it."""
    latency_ms, slo_ms, batch = 50.0, 1000.0, 4
    document = deployment("null:4", 1)
    (partition,) = document["nodes"][0]["gpus"][0]["partitions"]
    times_ms = [latency_ms * (0.5 + 0.5 * rows / batch) for rows in range(1, batch + 1)]
    partition["replicas"] = [
        partition["replicas"][0] | {"batch": batch, "batch_latency_ms": times_ms, "max_wait_ms": 5.0}
    ]
    document["models"]["m"]["slo_ms"] = slo_ms
    capacity_rps = 1000.0 * batch / latency_ms
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "map.json"
        path.write_text(json.dumps(document))
        command = [sys.executable, "-m", "gpuprof", "serve", str(path), "--port", "0", "--simulate"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
            settings = LoadSettings(duration_s=seconds, warmup_s=2.0, clients=1)
            (result,) = run_load(Target.parse(url), [Stream("m", times * capacity_rps, slo_ms)], settings).results
            process.terminate()
    return capacity_rps, result


def main() -> int:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each part")
    parser.add_argument("--model", default="null:600k", help="that dying workers serve: null:SIZE or an ONNX file")
    options = parser.parse_args()
    show_killed(killed_under_load(options.model, options.seconds))
    show_overloaded(*overloaded(3.0, options.seconds), options.seconds)
    return 0


def show_killed(got: Killed) -> None:
    """Print what became of a load during which a worker died."""
    counts = f"{got.answered} answered, {got.refused} refused, {got.failed} failed, {got.lost} lost"
    after = f"{got.meanwhile_ms:.1f} ms in the {RECOVERY_S:.0f} s after, {got.after_ms:.1f} ms from then on"
    print(f"kill -9 of one of two workers at {got.rate_rps:.0f} of {got.peak_rps:.0f} requests/s:")
    print(f"  {got.sent} sent, {counts}")
    print(f"  p99 {got.before_ms:.1f} ms before, {after}; the client sent up to {got.lag_ms:.1f} ms late", flush=True)


def show_overloaded(capacity_rps: float, got: ModelResult, seconds: float) -> None:
    """Print what came of more load than there is capacity."""
    part = 100.0 * got.goodput_rps / capacity_rps
    within = 100.0 * got.in_slo / max(1, got.answered)
    print(f"{got.rate_rps:.0f} requests/s at a capacity of {capacity_rps:.0f} for {seconds:.0f} s:")
    print(f"  goodput {got.goodput_rps:.1f}/s ({part:.1f}% of the capacity), {got.refused} refused, {got.lost} lost")
    print(f"  {within:.1f}% of the accepted within {got.slo_ms:.0f} ms, p99 {got.p99_ms or 0.0:.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
