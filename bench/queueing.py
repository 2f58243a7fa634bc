"""How far the queueing model is from brute force, over random replicas and loads.

    python -m bench.queueing [--configurations N] [--seed S] [--error E]

Draws replicas of 1 to 8 processes with batches of 1 to 32 whose time grows with their size in a line, in steps or not
at all, a wait for more requests of none to four services, gaps of squared coefficient of variation 0 to 4, services of
coefficient of variation 0 to 0.5, slower batches after a pause, and loads of 10% to 90%. Each is simulated request by
request until the standard errors of mean and p99 are below E, and again with other random numbers: where arrivals and
services hardly vary, several processes lock into a pattern that depends on how they started, and there is no one
answer to be near; those are counted apart. Prints the median and the largest error of mean, p50, p95 and p99, the
worst replicas, and what a call costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.brute_force import Truth, truth
from gpuprof.domain.sojourn import Arrivals, BatchServer, Sojourn
from gpuprof.estimators.queueing.queueing import BatchQueue

_REQUESTS = 1_000_000
_MOST = 32_000_000
_WORST = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """A replica under a load, how far the model is off, as fractions, and how long it took.

    ``locked``: brute force itself gives another answer from another start.
    """

    arrivals: Arrivals
    server: BatchServer
    errors: dict[str, float]
    brute_force_error: float
    cpu_s: float
    locked: bool

    def __str__(self) -> str:
        server = self.server
        load = self.arrivals.rate_rps / server.capacity_rps
        errors = ", ".join(f"{name} {100 * value:+.1f}%" for name, value in self.errors.items())
        return (
            f"{errors}: {server.processes} process(es), batch {server.batch}, load {load:.2f}, "
            f"scv {self.arrivals.scv:.2f}, cv {server.latency_cv:.2f}, wait {server.max_wait_ms:.2f} ms, "
            f"alone {server.latency_ms[0]:.2f} of {server.latency_ms[-1]:.2f} ms, pause x{server.pause_factor:.2f}"
        )


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--error", type=float, default=0.004)
    arguments = parser.parse_args()
    rows = [
        compare(arrivals, server, arguments.error, arguments.seed)
        for arrivals, server in configurations(arguments.configurations, arguments.seed)
    ]
    locked = [row for row in rows if row.locked]
    rows = [row for row in rows if not row.locked]
    for row in locked:
        print(f"  no one answer: {row}")
    print(f"{len(rows)} random replicas; brute force is known to {100 * max(c.brute_force_error for c in rows):.1f}%")
    for name in rows[0].errors:
        errors = sorted(abs(row.errors[name]) for row in rows)
        print(f"{name:5} median error {100 * statistics.median(errors):.2f}%, largest {100 * errors[-1]:.2f}%")
    print(f"a call takes {1000 * statistics.median(row.cpu_s for row in rows):.1f} ms of CPU time (median)")
    for row in sorted(rows, key=lambda row: -abs(row.errors["p99"]))[:_WORST]:
        print(f"  {row}")
    return 0


def configurations(count: int, seed: int) -> Iterator[tuple[Arrivals, BatchServer]]:
    """Yield random replicas, a full batch taking 10 ms, under random loads."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        batch, processes = int(2 ** random.uniform(0.0, 5.01)), int(random.integers(1, 9))
        fixed = random.uniform(0.0, 1.0)
        step = int(random.choice([1, 1, 4, 8, batch]))  # batches up to a multiple of it take as long
        sizes = np.minimum(np.ceil(np.arange(1, batch + 1) / step) * step, batch)
        server = BatchServer(
            tuple(10.0 * (fixed + (1.0 - fixed) * sizes / batch)),
            batch,
            10.0 * float(random.choice([0.0, random.uniform(0.0, 1.0), random.uniform(0.0, 4.0)])),
            processes,
            float(random.choice([0.0, random.uniform(0.0, 0.1), random.uniform(0.0, 0.5)])),
            float(random.choice([1.0, random.uniform(1.0, 1.6)])),
            None if random.random() < 0.5 else float(random.uniform(0.0, 0.5)),
            float(random.choice([0.0, random.uniform(0.0, 2.0)])),
        )
        scv = float(random.choice([0.0, 1.0, 1.0, 1.0, random.uniform(0.0, 1.0), random.uniform(0.0, 4.0)]))
        yield Arrivals(random.uniform(0.1, 0.9) * server.capacity_rps, scv), server


def compare(arrivals: Arrivals, server: BatchServer, error: float, seed: int) -> Comparison:
    """Return what the model says against brute force."""
    reference = truth(arrivals, server, _REQUESTS, seed, error, _MOST)
    again = truth(arrivals, server, _REQUESTS, seed + 1, error, _MOST)
    start = time.process_time()
    predicted = BatchQueue().sojourn(arrivals, server)
    spent = time.process_time() - start
    uncertain = max(reference.mean_error, reference.p99_error)
    apart = max(abs(again.mean / reference.mean - 1.0), abs(again.p99 / reference.p99 - 1.0))
    return Comparison(
        arrivals, server, _errors(predicted, reference), uncertain, spent, apart > 6.0 * max(error, uncertain)
    )


def _errors(predicted: Sojourn, truth: Truth) -> dict[str, float]:
    pairs = {
        "mean": (predicted.mean_ms, truth.mean),
        "p50": (predicted.percentile(50), truth.p50),
        "p95": (predicted.percentile(95), truth.p95),
        "p99": (predicted.percentile(99), truth.p99),
    }
    return {name: float(value / true - 1.0) for name, (value, true) in pairs.items()}


if __name__ == "__main__":
    raise SystemExit(main())
