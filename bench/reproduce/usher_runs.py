"""USHER's simulated clusters (OSDI'24, §5): what each scheduler decides for up to 15 million requests/s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench import usher_scale
from bench.reproduce.reproduction import Fact, mean
from bench.reproduce.shared_v100 import SharedV100
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError, InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.comparison import Outcome, compare
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.gpulet import Gpulet
from gpuprof.placement.published.usher import Usher

#: Load and GPUs are those of the paper over this, and what comes out is multiplied by it: one decision of USHER takes
#: a time that grows with the square of the replicas.
SCALE = 100.0
MOST_RPS = 15e6
#: Of the schedulers, those whose decision is USHER's; the others are the baselines.
USHERS = ("usher", "usher by WAO", "usher by WSM")
BASELINES = ("whole GPUs", "gpulet")

_WHY = (
    "The paper draws lines without numbers and gives ranges in the text. Its profiles of 20 models, its share of the "
    "Azure trace and its code are not published: here stand the eight models of its Table 1 that the thesis's V100 "
    "table holds, at rates that need about as much of the fleet each, and goodput by batch over latency.",
    "By the maximum occupancy, which USHER takes for a model's need of compute, hardly any two of these models fit on "
    "a GPU, and USHER is no better than whole GPUs: Elvinger's thesis (§5.3, §6) found the same. By the weighted "
    "occupancy (WAO) it takes half the GPUs, as the paper says, but that is a decision: on the thesis's testbed, and "
    "in thesis_fig6_1 here, shares so small do not hold the SLOs.",
    "Shepherd gives a model a GPU of its own, and 'whole GPUs' stands for it, at the best that can be done so; "
    "AlpaServe is not there. gpulet splits a GPU once, by shares whose time is stretched from the table; the paper "
    "counts the interference against it, here there is none.",
    "gpuprof's optimal places shares of 10% and believes the stretched times, not the requirements that USHER adds up.",
)


class WholeGpus(usher_scale.ScaledEstimator):
    """The table for models that have a GPU to themselves: it does not answer for smaller shares."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the row of the table.

        Raises
        ------
        InputError
            For less than a whole device.
        """
        if not share.is_whole:
            raise InputError(f"{model} was not measured on {share} of a {device.name}")
        return super().estimate(model, device, batch, share, beside, processes)


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A policy and what it believes; ``one_kind``: it places on one kind of GPU, so the cheapest kind is taken."""

    policy: Policy
    estimator: Estimator
    one_kind: bool = False


def why(scale: float) -> tuple[str, ...]:
    """Return what differs from the paper in all three figures, and why."""
    rounding = "which leaves the rounding to whole GPUs: at 1/10 of the paper's load USHER takes 3% fewer than at 1/100"
    return (*_WHY, f"Load and GPUs are 1/{scale:g} of the paper's and multiplied up again, {rounding}.")


def schedulers() -> Mapping[str, Scheduler]:
    """Return the schedulers by name."""
    table, shares = usher_scale.ScaledEstimator(), SharedV100(step_pct=10.0)
    return {
        "usher": Scheduler(Usher(), table),
        "usher by WAO": Scheduler(Usher(creq="wao"), table),
        "usher by WSM": Scheduler(Usher(creq="wsm"), table),
        "whole GPUs": Scheduler(Optimal(), WholeGpus()),
        "gpulet": Scheduler(Gpulet(), shares, one_kind=True),
        "optimal": Scheduler(Optimal(), shares),
    }


def demands(rate_rps: float, scale: float) -> tuple[Demand, ...]:
    """Return the models' demands at this rate together, divided by ``scale``."""
    whole = sum(demand.rate_rps for demand in usher_scale.demands())
    return tuple(replace(d, rate_rps=d.rate_rps * rate_rps / whole / scale) for d in usher_scale.demands())


def decide(wanted: Sequence[Demand], kinds: Sequence[str], count: int | None = None) -> dict[str, Outcome]:
    """Return what each scheduler decides, on ``count`` of each kind; None: as many as needed."""
    return {name: decide_one(name, one, wanted, kinds, count) for name, one in schedulers().items()}


def decide_one(
    name: str, one: Scheduler, wanted: Sequence[Demand], kinds: Sequence[str], count: int | None = None
) -> Outcome:
    """Return what one scheduler decides; of one that places on one kind, on the kind where that costs least."""
    fleets = [[kind] for kind in kinds] if one.one_kind else [list(kinds)]
    found = []
    for fleet in fleets:
        entries = tuple(FleetEntry(device(kind), count) for kind in fleet)
        given = Problem(tuple(wanted), Fleet(entries), one.estimator, BatchQueue(), Options(latency_budget=1.0))
        found.append(compare(given, [(name, one.policy)])[0])
    return min(found, key=_worth)


def _worth(outcome: Outcome) -> tuple[float, float]:
    if outcome.objective is None:
        raise GpuprofError(f"{outcome.policy}: {outcome.reason}")
    return round(outcome.missing_rps, 6), outcome.objective.cost_per_hour


def sound(runs: Sequence[Mapping[str, Outcome]]) -> bool:
    """Whether every map passed the independent check."""
    return not any(outcome.violations for run in runs for outcome in run.values())


def ratios(
    runs: Sequence[Mapping[str, Outcome]],
    figure: Callable[[Outcome], float],
    printed: tuple[float, float],
    where: str,
    *,
    more: bool,
) -> tuple[Fact, ...]:
    """Return by how many times each USHER is better than each baseline, the mean over the runs.

    ``more``: better is more, as of goodput; else less, as of GPUs and cost.
    """
    facts = []
    for own in USHERS:
        for other in BASELINES:
            pairs = [(figure(run[own]), figure(run[other])) for run in runs]
            times = [a / b if more else b / a for a, b in pairs if a > 0 and b > 0]
            facts.append(Fact(f"{own} better than {other}, times", where, printed, mean(times), 1))
    return tuple(facts)
