"""The papers' own figures through ``gpuprof place`` on imported data: prints the commands, runs them with ``--run``.

    python -m bench.reproduce --reference DIRECTORY --work FOLDER --run

Each command stands with what the paper prints (for ``optimal``: the fewest GPUs that its measurements allow), and with
``--run`` with what came out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import igniter_profiles, parvagpu_profiles
from bench.reproduce.command import find_published
from bench.reproduce.igniter_runs import SOURCE as IGNITER_SOURCE
from bench.reproduce.parvagpu_runs import SOURCE as PARVAGPU_SOURCE
from bench.reproduce.place_lines import write_demands
from gpuprof.domain.catalogue import datasets
from gpuprof.domain.demand import Demand, Slo

#: GPUs of ParvaGPU's scenarios (SC'24, Figure 5, its own policy) and what measurements allow at the least.
_PARVAGPU = {1: (2, 2), 2: (3, 3), 3: (5, 5), 4: (7, 7), 5: (13, 12), 6: (16, 15)}
#: The examples of Elvinger's thesis (§5.4) on four V100: models, requests/s of each, SLO, goodput by usher and by milp.
_THESIS = (
    (("alexnet", "gpt2", "resnet50", "t5"), 400.0, 200.0, 800.0, 1092.04),
    (("resnet50", "vgg19", "mobilenet_v2", "gpt2", "bert"), 400.0, 300.0, 793.57, 1331.19),
    (("resnet50", "alexnet", "mobilenet_v2", "bert"), 500.0, 200.0, 1500.0, 1624.88),
)
#: Figure 6.15 at 4000 requests/s and 150 ms, where the bars carry no numbers: what `optimal` reaches simulated on the
#: thesis's cluster (`thesis_fig6_15`); the best of the thesis's policies reaches 2,407 there.
_FIGURE_6_15 = (("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19"), 800.0, 150.0, 3995.0)
#: So many orders of the demands are tried where usher may choose.
_ORDERS = 24
#: iGniter (TPDS'22), Table 1: shares in percent; and GPUs of the twelve workloads (Figure 14).
_TABLE_1 = {"alexnet": 10.0, "resnet50": 30.0, "vgg19": 37.5}
_TWELVE = 6
#: Each of ParvaGPU's services so many times over (Figure 10), and how long `optimal` may take for all of them.
_TENANTS, _TENANTS_LIMIT = 10, "20"


@dataclass(frozen=True)
class ReproductionStep:
    """One command.

    Attributes
    ----------
    arguments : tuple of str
        Of ``gpuprof``.
    expected : str
        What must come of it; empty for a preparation.
    figure : str
        Which figure of the map is meant: ``"gpus"``, ``"goodput"`` or ``"shares"``.
    output : Path or None
        The map.
    limit : {"", "at most", "at least"}
        How the figure must compare with ``expected``; empty: it must be it.
    """

    arguments: tuple[str, ...]
    expected: str = ""
    figure: str = ""
    output: Path | None = None
    limit: str = ""

    def agrees(self, found: str) -> bool:
        """Whether a figure of the map is what must come of it."""
        if self.limit:
            over = float(found) - float(self.expected)
            return over <= 0.0 if self.limit == "at most" else over >= 0.0
        return found == self.expected

    @property
    def command(self) -> str:
        """The line to type."""
        return shlex.join(("gpuprof", *self.arguments))


def list_steps(reference: Path, work: Path) -> Iterator[ReproductionStep]:
    """Write the demands of the papers into ``work`` and yield the commands in their order.

    Raises
    ------
    InputError
        When a publication's data is not there.
    """
    yield from _parvagpu_steps(find_published(reference, "parvagpu_a100", PARVAGPU_SOURCE), work)
    yield from _igniter_steps(find_published(reference, "igniter_v100", IGNITER_SOURCE) / "config.jsonl", work)
    yield from _thesis_steps(work)


def _parvagpu_steps(directory: Path, work: Path) -> Iterator[ReproductionStep]:
    database = work / "parvagpu-db"
    yield ReproductionStep(("db", "import", str(directory), "--db", str(database)))
    for number, (paper, least) in _PARVAGPU.items():
        slo = write_demands(work / f"S{number}.csv", parvagpu_profiles.scenario(directory, number))
        rules = ("--estimator", "measured", "--latency-budget", "0.45", "--max-processes", "5", "--gpus", "a100-80")
        own = (*rules, "--policy", "parvagpu", "-O", "processes=5")
        yield _place(work, f"S{number}-parvagpu", slo, database, own, paper)
        yield _place(work, f"S{number}-optimal", slo, database, rules, least)
        # Ten tenants ask each service of their own; of that the paper prints no maps, only that it takes no more.
        tenants = write_demands(work / f"S{number}x10.csv", _tenants(parvagpu_profiles.scenario(directory, number)))
        yield replace(_place(work, f"S{number}x10-parvagpu", tenants, database, own, 10 * paper), limit="at most")
        limited = (*rules, "--time-limit", _TENANTS_LIMIT)
        yield replace(_place(work, f"S{number}x10-optimal", tenants, database, limited, 10 * least), limit="at most")


def _igniter_steps(profile: Path, work: Path) -> Iterator[ReproductionStep]:
    rules = ("--estimator", "igniter", "--latency-budget", "0.5", "--gpus", "v100", "--policy", "igniter")
    database = work / "igniter-db"
    yield ReproductionStep(("db", "import", str(profile), "--db", str(database)))
    table_1 = write_demands(work / "table1.csv", igniter_profiles.table_1()[1])
    yield replace(_place(work, "table1", table_1, database, rules, 1), expected=json.dumps(_TABLE_1), figure="shares")
    names, demands = igniter_profiles.table_3()
    services = [replace(demand, source_model=names[demand.model]) for demand in demands]
    yield _place(work, "twelve", write_demands(work / "twelve.csv", services), database, rules, _TWELVE)


def _thesis_steps(work: Path) -> Iterator[ReproductionStep]:
    database = work / "thesis-db"
    yield ReproductionStep(("db", "import", str(datasets() / "v100_profiles.csv"), "--db", str(database)))
    rules = ("--estimator", "usher", "--latency-budget", "1.0", "--gpus", "v100:4", "--best-effort")
    for number, (models, rate_rps, slo_ms, usher, milp) in enumerate(_THESIS, start=1):
        demands = [Demand(name, rate_rps, Slo(slo_ms)) for name in models]
        slo = write_demands(work / f"thesis{number}.csv", demands)
        # the thesis's MILP holds replicas to no share (§6.1.3)
        for policy, goodput, given in (("usher", usher, ""), ("milp", milp, "-O unshared=true")):
            options = (*rules, "--policy", policy, *given.split())
            step = _place(work, f"thesis{number}-{policy}", slo, database, options, 4)
            yield replace(step, expected=f"{goodput:.2f}", figure="goodput")
        ordered = (*rules, "--policy", "usher", "-O", f"orders={_ORDERS}")
        for name, own, least in (("usher-ordered", ordered, usher), ("optimal", rules, milp)):
            step = _place(work, f"thesis{number}-{name}", slo, database, own, 4)
            yield replace(step, expected=f"{least:.2f}", figure="goodput", limit="at least")
    models, rate_rps, slo_ms, least = _FIGURE_6_15
    slo = write_demands(work / "fig6.15.csv", [Demand(name, rate_rps, Slo(slo_ms)) for name in models])
    # Planned with queues: without a budget for the latency of a batch, p99 is what keeps the SLO.
    step = _place(work, "fig6.15-optimal", slo, database, ("--estimator", "usher", *rules[4:]), 4)
    yield replace(step, expected=f"{least:.2f}", figure="goodput", limit="at least")


def _place(work: Path, name: str, slo: Path, database: Path, rules: Iterable[str], gpus: int) -> ReproductionStep:
    output = work / f"{name}.json"
    arguments = ("place", "--slo-file", str(slo), "--db", str(database), *rules, "-o", str(output))
    return ReproductionStep(arguments, str(gpus), "gpus", output)


def _tenants(demands: Sequence[Demand]) -> list[Demand]:
    """Return each demand as a service of ten tenants, who run the same model."""
    return [
        replace(demand, model=f"{demand.model}-{tenant}", source_model=demand.model)
        for tenant in range(1, _TENANTS + 1)
        for demand in demands
    ]


def read_figure(step: ReproductionStep) -> str:
    """Return the figure of a step's map that the paper prints."""
    content = json.loads(step.output.read_text(encoding="utf-8")) if step.output is not None else {}
    if step.figure == "gpus":
        return str(content["predicted"]["gpus"])
    if step.figure == "goodput":
        return f"{content['predicted']['goodput_rps']:.2f}"
    gpus = [gpu for node in content["nodes"] for gpu in node["gpus"]]
    replicas = [one for gpu in gpus for part in gpu["partitions"] for one in part["replicas"]]
    return json.dumps(
        {one["model"]: one["sm_share_pct"] for one in sorted(replicas, key=lambda one: str(one["model"]))}
    )


def main() -> int:
    """Print the commands, run them where that is asked, and return 1 where a figure is another than the paper's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--reference", type=Path, required=True, help="folder of the published data")
    parser.add_argument("--work", type=Path, default=Path("reproduced"), help="where demands, databases and maps go")
    parser.add_argument("--run", action="store_true", help="run the commands, too")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    different = 0
    for step in list_steps(chosen.reference, chosen.work):
        print(step.command)
        if not chosen.run:
            if step.expected:
                print(f"  # {step.figure}: {f'{step.limit} '.lstrip()}{step.expected}")
            continue
        command = [sys.executable, "-m", "gpuprof", *step.arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and (step.output is None or not step.output.exists()):
            print(done.stderr, file=sys.stderr)
            return 1
        if step.expected:
            found = read_figure(step)
            different += not step.agrees(found)
            print(f"  {step.figure}: {found}, expected {f'{step.limit} '.lstrip()}{step.expected}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
