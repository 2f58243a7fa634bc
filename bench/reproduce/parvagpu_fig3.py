"""Throughput and latency of InceptionV3 by instance, batch and processes (ParvaGPU, SC'24, Figures 3 and 4).

    python -m bench.reproduce.parvagpu_fig3 [--reference DIRECTORY] [--plot FILE.svg|FILE.png] [--json]

Needs the profiles that its authors publish: put prof_data and SLO of https://github.com/MunQ-Lee/ParvaGPU_SC24 into
DIRECTORY/parvagpu_a100.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.parvagpu_profiles import read_latencies
from bench.reproduce import command
from bench.reproduce.parvagpu_runs import SOURCE
from bench.reproduce.reproduction import Fact, Reproduction, lines
from gpuprof.domain.estimate import Workload
from gpuprof.reporting.chart import Axis

MODEL, _PROCESSES, _BATCHES = "inceptionv3", (1, 2, 3), (1, 2, 4, 8, 16, 32, 64, 128)
#: §III-B: requests/s and ms of a batch of four in one slice, by processes.
_SAID = {1: (354, 11), 2: (444, 18), 3: (446, 27)}

_WHY = (
    "These are the authors' own measurements as they publish them, which gpuprof imports; where the memory did not "
    "suffice there is none. The figures also draw instances of five and six slices, which do not exist.",
    "The text says 354 requests/s of one process in one slice with batches of four, the published table 364.",
)


def compute(reference: Path) -> Reproduction:
    """Read both figures off the published table."""
    measured = read_latencies(command.find_published(reference, "parvagpu_a100", SOURCE))
    known = {one: time for one, time in measured.items() if one.model == MODEL}
    sizes = sorted({_slices(one) for one in known})
    rate: dict[tuple[int, int, int], float] = {}
    time: dict[tuple[int, int, int], float] = {}
    for one, ms in known.items():
        key = (one.processes, _slices(one), one.batch)
        rate[key], time[key] = 1000.0 * one.batch * one.processes / ms, ms
    rows = [
        (f"{what}, {processes} processes, {size} slices", *(values.get((processes, size, batch)) for batch in _BATCHES))
        for what, values in (("requests/s", rate), ("ms", time))
        for processes in _PROCESSES
        for size in sizes
    ]
    charts = tuple(
        lines(
            f"{MODEL}, {processes} process{'es' if processes > 1 else ''} (ParvaGPU, Figure {figure})",
            Axis("batch", log=True, marks=tuple(map(float, _BATCHES))),
            Axis(label, low=0.0),
            {f"{size} slices": {float(b): values.get((processes, size, b)) for b in _BATCHES} for size in sizes},
        )
        for figure, label, values in ((3, "throughput (requests/s)", rate), (4, "latency (ms)", time))
        for processes in _PROCESSES
    )
    return Reproduction(
        title=f"ParvaGPU Figures 3 and 4: {MODEL} on instances of an A100, by batch",
        header=("what", *map(str, _BATCHES)),
        rows=tuple(rows),
        facts=_facts(rate, time),
        differences=_WHY,
        charts=charts,
    )


def _slices(workload: Workload) -> int:
    return int(str(workload.share.mig).partition("g")[0])


def _facts(rate: dict[tuple[int, int, int], float], time: dict[tuple[int, int, int], float]) -> tuple[Fact, ...]:
    facts = []
    for processes, (rps, ms) in _SAID.items():
        what = f"of {processes} process{'es' if processes > 1 else ''}, one slice, batch 4"
        facts.append(Fact(f"requests/s {what}", "§III-B", rps, rate.get((processes, 1, 4))))
        facts.append(Fact(f"ms {what}", "§III-B", ms, time.get((processes, 1, 4))))
    return tuple(facts)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
