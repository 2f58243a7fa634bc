"""How soon goodput is back after an overload, a pause or a slow phase: the router in virtual time at the planned rate.

    python -m bench.recovery [--seconds SECONDS]

Two replicas serve a model at 80% of what they can do. After 20 s something happens to them; from then on it is printed
what part of the requests of each second was answered within the SLO, and after how many seconds it is again, and stays,
what it was before. ``bench.reliability`` prints it, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.virtual_server import Outage, SlowPhase, VirtualRun, serve
from gpuprof.domain.deployment import Replica, ReplicaPrediction
from gpuprof.load.traffic import arrival_times

#: Goodput is back within so many seconds after a disturbance has ended, and up to so little of what it was.
WITHIN_S, TOLERANCE = 10.0, 0.02
LOAD, BEFORE_S, CV = 0.8, 20.0, 0.05
_WINDOW_S = 2.0


@dataclass(frozen=True)
class Disturbance:
    """What happens from ``BEFORE_S`` on, for ``lasts_s``; ``overload`` is in parts of what the replicas can do."""

    name: str
    lasts_s: float
    overload: float = 0.0
    outages: tuple[Outage, ...] = ()
    slow: tuple[SlowPhase, ...] = ()


@dataclass(frozen=True)
class Recovery:
    """Parts of the requests that were in time: before, and by the seconds after the disturbance has ended."""

    name: str
    before: float
    after: tuple[float, ...]
    window_s: float = _WINDOW_S

    @property
    def seconds(self) -> float:
        """Seconds from the end of the disturbance until goodput is and stays what it was; infinite: not seen."""
        bad = [number for number, part in enumerate(self.after) if part < self.before - TOLERANCE]
        back = (bad[-1] + 1 if bad else 0) * self.window_s
        return back if back < len(self.after) * self.window_s else float("inf")


def replica_of(times_ms: Sequence[float], cv: float = CV, max_wait_ms: float = 0.0, processes: int = 1) -> Replica:
    """Return a replica of a model ``m`` whose batches of 1, 2, … take so long on average."""
    rate = 1000.0 * len(times_ms) * processes / times_ms[-1]
    said = ReplicaPrediction(latency_ms=times_ms[-1], latency_cv=cv, throughput_rps=rate, goodput_rps=rate)
    return Replica(
        model="m", batch=len(times_ms), processes=processes, max_wait_ms=max_wait_ms, rate_rps=rate,
        batch_latency_ms=tuple(times_ms), predicted=said,
    )  # fmt: skip


def disturbances() -> list[Disturbance]:
    """Return what is tried."""
    at = 1000.0 * BEFORE_S

    def stop_both(seconds: float, factor: float = float("inf")) -> tuple[SlowPhase, ...]:
        return tuple(SlowPhase(number, at, at + 1000.0 * seconds, factor) for number in range(2))

    return [
        Disturbance("five times the load for 5 s", 5.0, overload=5.0),
        Disturbance("three times the load for 30 s", 30.0, overload=3.0),
        Disturbance("one worker stopped for 1 s", 1.0, slow=stop_both(1.0)[:1]),
        Disturbance("both workers stopped for 1 s", 1.0, slow=stop_both(1.0)),
        Disturbance("batches three times as long for 5 s", 5.0, slow=stop_both(5.0, 3.0)),
        Disturbance("one worker gone for 3 s", 3.0, outages=(Outage(0, at, at + 3000.0),)),
        Disturbance("no worker for 1 s", 1.0, outages=tuple(Outage(i, at, at + 1000.0) for i in range(2))),
    ]


def recover(case: Disturbance, batch: int, slo_batches: float, after_s: float, load: float = LOAD) -> Recovery:
    """Play one disturbance of two replicas with this batch, whose SLO is so many times that of a full one."""
    times = [10.0 + 30.0 * rows / 32.0 for rows in range(1, batch + 1)]
    capacity_rps = 2 * 1000.0 * batch / times[-1]
    slo_ms = slo_batches * times[-1]
    end_s = BEFORE_S + case.lasts_s + after_s
    arrivals = arrival_times("poisson", load * capacity_rps, end_s, 1)
    if case.overload:
        more = arrival_times("poisson", (case.overload - load) * capacity_rps, case.lasts_s, 2)
        arrivals = np.sort(np.concatenate([arrivals, BEFORE_S + more]))
    run = serve([replica_of(times)] * 2, (1000.0 * arrivals).tolist(), case.outages, slo_ms=slo_ms, slow=case.slow)
    ended_ms = 1000.0 * (BEFORE_S + case.lasts_s)
    starts = np.arange(ended_ms, 1000.0 * end_s - 1000.0 * _WINDOW_S + 1.0, 1000.0 * _WINDOW_S)
    after = tuple(_in_time(run, slo_ms, begin, begin + 1000.0 * _WINDOW_S) for begin in starts.tolist())
    return Recovery(case.name, _in_time(run, slo_ms, 5000.0, 1000.0 * BEFORE_S), after)


def _in_time(run: VirtualRun, slo_ms: float, begin_ms: float, end_ms: float) -> float:
    came = sum(begin_ms <= one.at_ms < end_ms for one in run.requests)
    return run.in_time(slo_ms, begin_ms, end_ms) / came if came else 1.0


def show_recoveries(after_s: float = 20.0) -> bool:
    """Print how each disturbance was overcome, and return whether all were in time."""
    good = True
    print(
        f"in virtual time, at {LOAD:.0%} of two replicas; within the SLO before → in the {_WINDOW_S:g} s windows after:"
    )
    for batch, slo_batches in ((1, 6.0), (8, 4.0), (32, 2.5)):
        for case in disturbances():
            found = recover(case, batch, slo_batches, after_s)
            fits = found.seconds <= WITHIN_S
            good &= fits
            windows = " ".join(f"{100.0 * part:.0f}" for part in found.after[:6])
            print(
                f"  batch {batch:2d}, SLO {slo_batches:g} batches: {case.name:36s} {100.0 * found.before:5.1f}% → "
                f"{windows} %, back after {found.seconds:.0f} s{'' if fits else '  TOO LATE'}",
                flush=True,
            )
    return good


def main() -> int:
    """Print all of it; 0 when goodput was back in time everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="that are looked at after each disturbance")
    return 0 if show_recoveries(parser.parse_args().seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
