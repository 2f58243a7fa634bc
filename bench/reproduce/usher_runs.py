"""USHER's simulated clusters (OSDI'24, §5): what each scheduler decides for up to 15 million requests/s."""

from __future__ import annotations

import hashlib
import io
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bench import usher_scale
from bench.reproduce.place_lines import WORK, make_named_policy
from bench.reproduce.reproduction import Fact, mean
from bench.reproduce.stand_in_db import write_stand_ins
from gpuprof.cli.main import main
from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.map_file import read_map
from gpuprof.errors import GpuprofError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.kernel_db.store import KernelDb
from gpuprof.placement.policies import Policy

#: The kinds of GPU of the figures; shares are the multiples of this.
KINDS = ("k80", "v100", "a100-80", "h100")
SHARE_STEP_PCT = 10.0
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
    "gpuprof's optimal places shares of 10% and believes the stretched times, not the requirements that USHER adds up. "
    "It takes batches between those of the table, too; 'whole GPUs' and gpulet take none.",
)


@dataclass(frozen=True, slots=True)
class Scheduler:
    """What ``gpuprof place`` is told for one scheduler.

    Attributes
    ----------
    policy : str
        ``--policy`` and, where they follow, its ``-O``.
    estimator : str
        ``--estimator``.
    database : {"whole", "shares"}
        Which of the databases of `stand_in_db` it is asked with.
    one_kind : bool
        Whether it places on one kind of GPU, so that the cheapest kind is taken.
    """

    policy: str
    estimator: str
    database: Literal["whole", "shares"]
    one_kind: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What one scheduler decided: the command that was run, and the map that it wrote.

    ``gpuprof place`` checks each map by rules of its own before it writes it.
    """

    command: str
    deployment: DeploymentMap

    @property
    def missing_rps(self) -> float:
        """Requests/s that are not served."""
        return math.fsum(one.rate_rps for one in self.deployment.unplaced)

    @property
    def goodput_rps(self) -> float:
        """Requests/s within their SLOs."""
        return self.deployment.predicted.goodput_rps

    @property
    def gpus(self) -> float:
        """GPUs that hold something."""
        return float(self.deployment.predicted.gpus)

    @property
    def cost_per_hour(self) -> float:
        """Their price in $ per hour."""
        return self.deployment.predicted.cost_per_hour or 0.0


def why(scale: float) -> tuple[str, ...]:
    """Return what differs from the paper in all three figures, and why."""
    rounding = "which leaves the rounding to whole GPUs: at 1/10 of the paper's load USHER takes 3% fewer than at 1/100"
    return (*_WHY, f"Load and GPUs are 1/{scale:g} of the paper's and multiplied up again, {rounding}.")


def schedulers() -> Mapping[str, Scheduler]:
    """Return the schedulers by name."""
    return {
        "usher": Scheduler("usher", "usher", "whole"),
        "usher by WAO": Scheduler("usher -O creq=wao", "usher", "whole"),
        "usher by WSM": Scheduler("usher -O creq=wsm", "usher", "whole"),
        # only what was measured, and that was whole GPUs
        "whole GPUs": Scheduler("optimal", "measured", "whole"),
        "gpulet": Scheduler("gpulet", "usher", "shares", one_kind=True),
        "optimal": Scheduler("optimal", "usher", "shares"),
    }


def make_scheduler(one: Scheduler, work: Path) -> tuple[Policy, Estimator]:
    """Return what ``gpuprof place`` makes of the names, where decisions follow one another in one program."""
    database = KernelDb(databases(work)[one.database])
    return make_named_policy(one.policy), make_estimator(one.estimator, database)


def databases(work: Path) -> dict[str, Path]:
    """Write the databases that the schedulers are asked with into ``work``, unless they are there, and return them."""
    return {
        "whole": write_stand_ins(work / "usher-whole-db", KINDS),
        "shares": write_stand_ins(work / "usher-shares-db", KINDS, SHARE_STEP_PCT),
    }


def demands(rate_rps: float, scale: float) -> tuple[Demand, ...]:
    """Return the models' demands at this rate together, divided by ``scale``."""
    whole = sum(demand.rate_rps for demand in usher_scale.demands())
    return tuple(replace(d, rate_rps=d.rate_rps * rate_rps / whole / scale) for d in usher_scale.demands())


def decide(
    wanted: Sequence[Demand], kinds: Sequence[str], count: int | None = None, work: Path = WORK
) -> dict[str, Decision]:
    """Return what each scheduler decides, on ``count`` of each kind; None: as many as needed."""
    return {name: decide_one(one, wanted, kinds, count, work) for name, one in schedulers().items()}


def decide_one(
    one: Scheduler, wanted: Sequence[Demand], kinds: Sequence[str], count: int | None = None, work: Path = WORK
) -> Decision:
    """Return what one scheduler decides; of one that places on one kind, on the kind where that costs least.

    Raises
    ------
    GpuprofError
        When ``gpuprof place`` writes no map.
    """
    fleets = [[kind] for kind in kinds] if one.one_kind else [list(kinds)]
    given = [",".join(kind if count is None else f"{kind}:{count}" for kind in fleet) for fleet in fleets]
    return min((_place(one, wanted, gpus, work) for gpus in given), key=_worth)


def _place(one: Scheduler, wanted: Sequence[Demand], gpus: str, work: Path) -> Decision:
    """Run ``gpuprof place``."""
    database = databases(work)[one.database]
    content = "model,rate_rps,slo_ms\n" + "".join(f"{d.model},{d.rate_rps!r},{d.slo.latency_ms!r}\n" for d in wanted)
    slo = work / f"usher-{hashlib.sha256(content.encode()).hexdigest()[:8]}.csv"
    slo.write_text(content, encoding="utf-8")
    name = "-".join((slo.stem, *one.policy.replace("-O ", "").split(), one.database, gpus))
    output = work / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.json"
    output.unlink(missing_ok=True)
    rules = ("--estimator", one.estimator, "--latency-budget", "1", "--gpus", gpus, "--policy", *one.policy.split())
    arguments = ("place", "--slo-file", str(slo), "--db", str(database), *rules, "--best-effort", "-o", str(output))
    told = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(told):
        main(arguments)
    command = shlex.join(("gpuprof", *arguments))
    if not output.exists():
        raise GpuprofError(f"{command}: {told.getvalue().strip()}")
    return Decision(command, read_map(output))


def _worth(decision: Decision) -> tuple[float, float]:
    return round(decision.missing_rps, 6), decision.cost_per_hour


def commands(runs: Sequence[Mapping[str, Decision]], work: Path) -> tuple[str, ...]:
    """Return the lines that were run, those that write the databases first."""
    kinds = ",".join(KINDS)
    return (
        f"python -m bench.reproduce.stand_in_db {work}/usher-whole-db --gpus {kinds}",
        f"python -m bench.reproduce.stand_in_db {work}/usher-shares-db --gpus {kinds} --step-pct {SHARE_STEP_PCT:g}",
        *(decision.command for run in runs for decision in run.values()),
    )


def ratios(
    runs: Sequence[Mapping[str, Decision]],
    figure: Callable[[Decision], float],
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
