"""Where the time of requests goes, and how full batches are (Elvinger, ETH 2024, Figures 6.6, 6.9a, 6.13, 6.17, 6.19).

python -m bench.reproduce.thesis_latencies [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.reproduce import command, thesis_fig6_1, thesis_fig6_10, thesis_fig6_15
from bench.reproduce.reproduction import Cell, Fact, Reproduction
from bench.reproduce.thesis_cluster import Experiment, Plan, list_lines, plan, rebuild_map, simulate_cluster
from gpuprof.reporting.chart import Axis, Chart, group_bars
from gpuprof.simulator.outcome import SimulationOutcome

_HEAVY, _DENSE = "efficientnet_b7", "densenet121"
#: Batches of efficientnet_b7 by usher and ao-milp on six GPUs, and what the text says of them: requests/s answered, and
#: in time (§6.2.1, observation 3).
_SAID = {8: (425.75, 360.61), 64: (425.25, 143.73)}
#: §6.2.1, observation 5: part of efficientnet_b7's requests that iGniter's map answers within 100 ms, in percent.
_WITHIN_100_MS = 62.5
_STAGES = ("network", "batching", "queue", "service")

_WHY = (
    "The thesis draws the 95th percentile of each part; the simulator keeps means and 99th percentiles, which stand "
    "here. Batching is the router's wait for a full batch, network the way to the node, queue the wait for the "
    "worker.",
    "Figure 6.6: two replicas of each batch, put down by hand: ours, of equally good plans, would not take batch 64."
    " More are in time than on the testbed, where workers and clients take time that no table has.",
    "Figure 6.9a: iGniter's map here has two replicas of efficientnet_b7 with batches of 25, none of which is "
    "answered within 100 ms; the thesis's has four, of 5 and 9. What neighbours add is not in the table.",
    "Figures 6.13 and 6.17: as there, the wait for the worker goes away as GPUs are added, and explodes once the "
    "rate comes near what a worker answers; the thesis prints no numbers. Neighbours cost nothing here.",
    "Figure 6.19: batches of 64 put down by hand, as AO-MILP's solver took them: at 600 requests/s the router's "
    "limit of 100 ms sends most of them before they are full, at 1000 few, as §6.2.3 works out.",
    "optimal waits for no batch to fill: its rules are not the thesis's, and it stands in the figures of goodput.",
)


@dataclass(frozen=True, slots=True)
class Watched:
    """A map, and which model of it is looked at."""

    figure: str
    label: str
    plan: Plan
    experiment: Experiment
    model: str


def list_watched() -> list[Watched]:
    """Return the maps of the figures."""
    vision, mixed = thesis_fig6_1.EXPERIMENT, thesis_fig6_10.EXPERIMENT
    found = list_watched_by_hand()
    igniter = plan("igniter", vision, 6)
    found += [Watched("6.9a", "igniter, 6 GPUs", igniter, vision, model) for model in vision.models]
    for gpus in (5, 6, 7):
        made = plan("wsm-milp", mixed, gpus)
        found += [Watched("6.13", f"wsm-milp, {gpus} GPUs", made, mixed, model) for model in ("bert", "gpt2")]
    for load in (3000, 4000):
        experiment = thesis_fig6_15.experiment(load, 250)
        made = plan("wsm-milp", experiment, 4)
        found.append(Watched("6.17", f"wsm-milp, {load / 5:g} requests/s", made, experiment, _DENSE))
    return found


def list_watched_by_hand() -> list[Watched]:
    """Return the maps with batches that the thesis's solver took, put down by hand."""
    alone = replace(thesis_fig6_1.EXPERIMENT, models=(_HEAVY,))
    found = [
        Watched("6.6", f"two replicas of batch {batch}", rebuild_map(alone, [{_HEAVY: batch}] * 2), alone, _HEAVY)
        for batch in _SAID
    ]
    for load in (3000, 5000):
        experiment = replace(thesis_fig6_15.experiment(load, 250), models=(_DENSE,))
        made = rebuild_map(experiment, [{_DENSE: 64}])
        found.append(Watched("6.19", f"batch 64, {load / 5:g} requests/s", made, experiment, _DENSE))
    return found


@dataclass(frozen=True, slots=True)
class Times:
    """What became of a model's requests: requests/s, mean and largest p99 of each part in ms, mean batch."""

    answered_rps: float
    in_time_rps: float
    mean_ms: tuple[float | None, ...]
    queue_p99_ms: float | None
    mean_batch: float | None
    within_100_ms_pct: float | None


def compute(_: Path, watched: Sequence[Watched] | None = None) -> Reproduction:
    """Simulate each map and look at the parts of the latency."""
    chosen = list_watched() if watched is None else list(watched)
    seen = [(one, _look_at(simulate_cluster(one.plan, one.experiment, 0), one.model)) for one in chosen]
    rows: list[tuple[Cell, ...]] = [
        (
            one.figure,
            one.label,
            one.model,
            times.answered_rps,
            times.in_time_rps,
            *times.mean_ms,
            times.queue_p99_ms,
            times.mean_batch,
        )
        for one, times in seen
    ]
    names = tuple(f"{one.figure} {one.model}, {one.label}" for one, _ in seen)
    parts = {stage: [times.mean_ms[i] for _, times in seen] for i, stage in enumerate(_STAGES)}
    bars = group_bars(names, parts, "ms")
    return Reproduction(
        title="Thesis Figures 6.6, 6.9a, 6.13, 6.17 and 6.19: requests/s, parts of the latency in ms, and batches",
        header=("figure", "map", "model", "answered/s", "in time/s", *_STAGES, "queue p99", "mean batch"),
        rows=tuple(rows),
        facts=_facts(seen),
        differences=_WHY,
        charts=(Chart("Parts of the latency (thesis)", Axis("map", names=names), Axis("mean (ms)"), boxes=bars),),
        sound=all(one.plan.sound for one, _ in seen),
        commands=list_lines(one.plan for one, _ in seen),
    )


def _look_at(outcome: SimulationOutcome | None, model: str) -> Times:
    """Return what the streams of a model saw together; nothing where it was not placed."""
    streams = [] if outcome is None else [one for one in outcome.models if one.model.split("@")[0] == model]
    answered = math.fsum(one.answered for one in streams)
    if outcome is None or not answered:
        return Times(0.0, 0.0, (None,) * len(_STAGES), None, None, None)
    means = tuple(
        math.fsum((one.stage_mean_ms[stage] or 0.0) * one.answered for one in streams) / answered for stage in _STAGES
    )
    queues = [one.stage_p99_ms["queue"] for one in streams if one.stage_p99_ms["queue"] is not None]
    own = [one for one in outcome.replicas if one.model.split("@")[0] == model and one.mean_batch]
    batches = math.fsum(one.answered / (one.mean_batch or 1.0) for one in own)
    within = math.fsum(one.answered * _fraction_within(outcome, one.model, 100.0) for one in streams)
    return Times(
        answered_rps=answered / outcome.duration_s,
        in_time_rps=math.fsum(one.goodput_rps for one in streams),
        mean_ms=means,
        queue_p99_ms=max(queues, default=None),
        mean_batch=math.fsum(one.answered for one in own) / batches if batches else None,
        within_100_ms_pct=100.0 * within / answered,
    )


def _fraction_within(outcome: SimulationOutcome, stream: str, limit_ms: float) -> float:
    """Return the part of a stream's answers within a limit, off its distribution."""
    series = next(one for one in outcome.series if one.model == stream)
    return max(
        (part for ms, part in zip(series.latency_ms, series.fraction, strict=True) if ms <= limit_ms), default=0.0
    )


def _facts(seen: Sequence[tuple[Watched, Times]]) -> tuple[Fact, ...]:
    facts = []
    for one, times in seen:
        if one.figure == "6.6":
            batch = next(size for size in _SAID if one.label.endswith(f"batch {size}"))
            answered, in_time = _SAID[batch]
            facts.append(Fact(f"{_HEAVY}, batch {batch}: answered/s", "§6.2.1", answered, times.answered_rps, 2))
            facts.append(Fact(f"{_HEAVY}, batch {batch}: in time/s", "§6.2.1", in_time, times.in_time_rps, 2))
        if one.figure == "6.9a" and one.model == _HEAVY:
            what = f"{_HEAVY} within 100 ms by igniter's map, %"
            facts.append(Fact(what, "§6.2.1", _WITHIN_100_MS, times.within_100_ms_pct, 1))
        if one.figure == "6.19":
            full = 64.0 if "1000" in one.label else (1.0, 63.9)
            facts.append(Fact(f"mean batch at {one.label}", "Figure 6.19", full, times.mean_batch))
    return tuple(facts)


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
