"""Does to a server what it must survive, and prints how it did: dying workers under load, and three times its capacity.

    python -m bench.reliability [--seconds S] [--model null:600k] [--slo-ms 500] [--only PART]

A worker is killed with SIGKILL while the server has 80% of the load that it bears, after a quarter of the time: one of
two, whose requests the other is sent again, and one that has nobody beside it, whose requests wait for its return. The
latency is back when two windows of half a second in a row have a p99 of at most 1.25 times that of the worst window
before, with nothing refused. Under three times the capacity, of simulated workers and of the model's own, goodput is to
stay at 90% of the capacity, and what is accepted within its SLO. Then come
``bench.beside``, ``bench.foreign_bytes``, ``bench.hostile`` and ``bench.recovery``. A part that fails does not end the
others; the last table says how each ended.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.beside import GIVE_UP_S, measure_beside, show_beside
from bench.foreign_bytes import show_foreign_bytes
from bench.hostile import show_hostile
from bench.recovery import show_recoveries
from bench.serving import closed_loop, deployment, server
from gpuprof.load.client import LoadClient, Schedule, SentRequests
from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.report import ModelResult
from gpuprof.load.target import Target, requests_for
from gpuprof.load.traffic import arrival_times

#: Part of the measured peak that is sent while a worker dies.
LOAD = 0.8
#: After so long the latency must be what it was.
RECOVERY_S = 5.0
WINDOW_S = 0.5
#: A window whose p99 is at most so much more than that of the worst before the kill is as good as those.
TOLERANCE = 1.25
_CONCURRENCY = 8
#: Longer than the SLO of the map: what has no answer by then is lost, and not only late.
_PATIENCE_S = 90.0
#: For so long foreign bytes are looked for at most.
_LOOKING_S = 1800.0


@dataclass(frozen=True)
class Window:
    """What became of the requests that were due in one window; ``begin_s`` counts from the kill."""

    begin_s: float
    answered: int
    refused: int
    p99_ms: float


@dataclass(frozen=True)
class Killed:
    """What became of a load during which a worker was killed.

    ``twice`` is how many answers the server counts beyond those that the client had. ``lag_ms`` is how late the client
    itself sent, at the 99th percentile: where it is not small, the latencies are the client's. ``peak_after_rps`` is
    the peak when all is over, with ``workers_after`` workers: where it is less than was sent although all are there,
    the machine has become slower meanwhile.
    """

    workers: int
    workers_after: int
    peak_rps: float
    peak_after_rps: float
    rate_rps: float
    sent: int
    answered: int
    refused: int
    failed: int
    lost: int
    twice: int
    lag_ms: float
    windows: tuple[Window, ...]

    @property
    def before_ms(self) -> float:
        """p99 of the worst window before the kill, the first not counted: connections are made in it."""
        return max(window.p99_ms for window in self.windows[1:] if window.begin_s < -WINDOW_S / 2.0)

    @property
    def worst_ms(self) -> float:
        """p99 of the worst window of the `RECOVERY_S` after the kill."""
        return max(w.p99_ms for w in self.windows if 0.0 <= w.begin_s + WINDOW_S / 2.0 < RECOVERY_S)

    def back_s(self, limit_ms: float) -> float:
        """Seconds from the kill to the first of two windows in a row with a p99 of at most that and nothing refused."""
        after = [window for window in self.windows if window.begin_s > -WINDOW_S / 2.0]
        for first, second in pairwise(after):
            if all(window.refused == 0 and window.p99_ms <= limit_ms for window in (first, second)):
                return max(0.0, first.begin_s)
        return float("inf")


def killed_under_load(model: str, seconds: float, workers: int = 2, slo_ms: float = 500.0) -> Killed:
    """Measure the peak of the workers, send `LOAD` of it, and kill a worker after a quarter of the time."""
    with server(model, workers, slo_ms) as (process, port):
        target = Target("127.0.0.1", port)
        peak_rps = closed_loop(process, port, _CONCURRENCY, min(3.0, seconds / 3.0)).rate_rps
        rate_rps = LOAD * peak_rps
        times = arrival_times("poisson", rate_rps, seconds, 0).tolist()
        requests = requests_for(target, "m", None, 0)
        schedule = Schedule("127.0.0.1", port, (requests,), times, [0] * len(times), patience_s=_PATIENCE_S)
        answered_before = _answers(target)
        start = time.monotonic() + 0.2
        kill = threading.Timer(0.2 + seconds / 4.0, _workers(process)[0].kill)
        kill.start()
        sent = LoadClient(schedule).run(start)
        kill.join()
        answers = _answers(target) - answered_before
        peak_after_rps = closed_loop(process, port, _CONCURRENCY, min(2.0, seconds / 3.0)).rate_rps
        counts = (workers, len(_workers(process)))
    return _summarise_kill(times, sent, (peak_rps, peak_after_rps, rate_rps), seconds / 4.0, counts, answers)


def _workers(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if "gpuprof.serving.worker.worker" in child.cmdline()]


def _answers(target: Target) -> int:
    """Return how many requests the server says it has answered."""
    (statistics,) = target.get("/v2/models/m/stats")["model_stats"]
    return int(statistics["inference_stats"]["success"]["count"])


def _summarise_kill(
    times: Sequence[float],
    sent: SentRequests,
    rates: tuple[float, float, float],
    killed_s: float,
    workers: tuple[int, int],
    answers: int,
) -> Killed:
    due, status = np.asarray(times), np.asarray(sent.status)
    answered = int((status == 200).sum())
    return Killed(
        workers=workers[0],
        workers_after=workers[1],
        peak_rps=rates[0],
        peak_after_rps=rates[1],
        rate_rps=rates[2],
        sent=len(due),
        answered=answered,
        refused=int((status == 503).sum()),
        failed=int(((status != 200) & (status != 503) & (status != 0)).sum()),
        lost=int((status == 0).sum()),
        twice=answers - answered,
        lag_ms=float(1000.0 * np.quantile(np.asarray(sent.sent_s) - due, 0.99)),
        windows=_windows(due, 1000.0 * (np.asarray(sent.done_s) - due), status, killed_s),
    )


def _windows(due: Any, latency_ms: Any, status: Any, killed_s: float) -> tuple[Window, ...]:
    """Cut the time into windows of which one begins with the kill."""
    windows = []
    for begin_s in np.arange(killed_s % WINDOW_S, due[-1] - WINDOW_S, WINDOW_S):
        own = (due >= begin_s) & (due < begin_s + WINDOW_S)
        good = latency_ms[own & (status == 200)]
        p99_ms = float(np.quantile(good, 0.99)) if len(good) else 0.0
        refused = int((status[own] == 503).sum())
        windows.append(Window(round(float(begin_s - killed_s), 6), len(good), refused, p99_ms))
    return tuple(windows)


def overload_worker(times: float, seconds: float) -> tuple[float, ModelResult]:
    """Send ``times`` the capacity to a simulated worker; return the capacity in requests/s and what came of it."""
    latency_ms, slo_ms, batch = 50.0, 1000.0, 4
    document = deployment("null:4", 1, slo_ms)
    (partition,) = document["nodes"][0]["gpus"][0]["partitions"]
    times_ms = [latency_ms * (0.5 + 0.5 * rows / batch) for rows in range(1, batch + 1)]
    partition["replicas"] = [
        partition["replicas"][0] | {"batch": batch, "batch_latency_ms": times_ms, "max_wait_ms": 5.0}
    ]
    capacity_rps = 1000.0 * batch / latency_ms
    with _serve_simulated(document) as target:
        return capacity_rps, _flood(target, times * capacity_rps, slo_ms, seconds)


def overloaded_model(model: str, workers: int, seconds: float, slo_ms: float) -> tuple[float, ModelResult, str]:
    """Measure the capacity of so many workers in a closed loop, then send three times as much; say also who computed.

    The client stands on the same machine: what it takes to send three times the capacity, workers cannot have.
    """
    with server(model, workers, slo_ms) as (process, port):
        capacity_rps = closed_loop(process, port, _CONCURRENCY, min(5.0, seconds / 3.0)).rate_rps
        everybody = {"client": [psutil.Process()], "router": [process], "workers": _workers(process)}
        before, began = _cpu_s(everybody), time.monotonic()
        result = _flood(Target("127.0.0.1", port), 3.0 * capacity_rps, slo_ms, seconds)
        took_s = time.monotonic() - began
        cores = {who: (after - before[who]) / took_s for who, after in _cpu_s(everybody).items()}
    return capacity_rps, result, ", ".join(f"{who} {part:.2f}" for who, part in cores.items())


def _cpu_s(everybody: dict[str, list[psutil.Process]]) -> dict[str, float]:
    return {who: sum(sum(one.cpu_times()[:2]) for one in processes) for who, processes in everybody.items()}


@contextmanager
def _serve_simulated(document: dict[str, Any]) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "map.json"
        path.write_text(json.dumps(document))
        command = [sys.executable, "-m", "gpuprof", "serve", str(path), "--port", "0", "--simulate"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            try:
                yield Target.parse(next(word for word in words if word.startswith("http://")))
            finally:
                process.terminate()


def _flood(target: Target, rate_rps: float, slo_ms: float, seconds: float) -> ModelResult:
    settings = LoadSettings(duration_s=seconds, warmup_s=2.0, clients=1, give_up_s=GIVE_UP_S)
    (result,) = run_load(target, [RequestStream("m", rate_rps, slo_ms)], settings).results
    return result


def main() -> int:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each part")
    parser.add_argument("--model", default="null:600k", help="null:SIZE or an ONNX file")
    parser.add_argument("--slo-ms", type=float, default=500.0, help="of the model")
    parser.add_argument("--answers", type=int, default=1_000_000, help="that are looked at for foreign bytes")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    options = parser.parse_args()
    return 0 if run_parts({name: part for name, part in _parts(options).items() if options.only in name}) else 1


def _parts(options: argparse.Namespace) -> dict[str, Callable[[], bool | None]]:
    """Return what is tried, by name; what returns False was not as it must be."""
    model, seconds, slo_ms = options.model, options.seconds, options.slo_ms

    def overload_model(workers: int) -> None:
        print(f"{workers} worker(s) of {Path(model).name} on a core each:")
        capacity_rps, result, cores = overloaded_model(model, workers, seconds, slo_ms)
        show_overloaded(capacity_rps, result, seconds)
        print(f"  cores that were busy: {cores}", flush=True)

    def overload_simulated() -> None:
        print("simulated workers, batches of 4:")
        show_overloaded(*overload_worker(3.0, seconds), seconds)

    return {
        "kill one of two workers": lambda: show_killed(killed_under_load(model, seconds, 2, slo_ms)),
        "kill the only worker": lambda: show_killed(killed_under_load(model, seconds, 1, slo_ms)),
        "overload simulated workers": overload_simulated,
        "overload one worker": partial(overload_model, 1),
        "overload two workers": partial(overload_model, 2),
        "overload beside another model": lambda: show_beside(measure_beside(3.0, min(10.0, seconds)), 3.0),
        "foreign bytes": lambda: show_foreign_bytes(options.answers, _LOOKING_S),
        "attacks": lambda: show_hostile(min(5.0, seconds)),
        "recovery": show_recoveries,
    }


def run_parts(parts: Mapping[str, Callable[[], bool | None]]) -> bool:
    """Run one part after another, whatever becomes of each; print at the end how each ended and return whether well."""
    ended = {}
    for name, part in parts.items():
        began = time.monotonic()
        try:
            outcome = "NOT AS IT MUST BE" if part() is False else "done"
        except Exception as error:  # a server that does not answer must not hide what the other parts find
            outcome = f"FAILED: {type(error).__name__}: {error}"
        ended[name] = f"{time.monotonic() - began:6.0f} s  {outcome}"
    width = max(map(len, ended), default=0)
    print("\n".join(["", *(f"{name:{width}s} {text}" for name, text in ended.items())]), flush=True)
    return all(text.endswith("done") for text in ended.values())


def show_killed(got: Killed) -> None:
    """Print what became of a load during which a worker died."""
    counts = f"{got.answered} answered, {got.refused} refused, {got.failed} failed, {got.lost} lost, {got.twice} twice"
    print(f"kill -9 of one of {got.workers} worker(s) at {got.rate_rps:.0f} of {got.peak_rps:.0f} requests/s:")
    print(f"  {got.sent} sent, {counts}; the client sent up to {got.lag_ms:.1f} ms late")
    print(f"  p99 of half a second {got.before_ms:.1f} ms at most before, {got.worst_ms:.1f} ms after,", end=" ")
    print(f"back at {TOLERANCE} times that after {got.back_s(TOLERANCE * got.before_ms):.1f} s")
    after = [window for window in got.windows if -WINDOW_S < window.begin_s < RECOVERY_S]
    print("  s after: p99 ms (refused): " + ", ".join(map(_window, after)), flush=True)


def _window(window: Window) -> str:
    refused = f" ({window.refused})" if window.refused else ""
    return f"{window.begin_s:.1f}: {window.p99_ms:.0f}{refused}"


def show_overloaded(capacity_rps: float, got: ModelResult, seconds: float) -> None:
    """Print what came of more load than there is capacity."""
    part = 100.0 * got.goodput_rps / capacity_rps
    within = 100.0 * got.in_slo / max(1, got.answered)
    print(f"  {got.rate_rps:.0f} requests/s at a capacity of {capacity_rps:.0f} for {seconds:.0f} s:", end=" ")
    print(f"goodput {got.goodput_rps:.1f}/s ({part:.1f}% of the capacity)")
    print(f"  {got.refused} refused, {got.lost} lost, or not sent for want of a connection")
    print(f"  {within:.1f}% of the accepted within {got.slo_ms:.0f} ms, p99 {got.p99_ms or 0.0:.0f} ms", flush=True)


if __name__ == "__main__":
    sys.exit(main())
