"""Takes models of many kinds from their files to a server, and prints what became of each.

    python -m bench.model_families [--only NAME ...] [--json FILE] [--models DIRECTORY]

Each kind is written as its users' tools write it (`bench.model_kinds`), then profiled on this machine's CPU, estimated
for a GPU, planned onto this machine, checked, served and asked for answers, by the functions that are gpuprof's
commands. Where one refuses, the table has its reason. It takes minutes. Kinds whose writer is not installed
(scikit-learn's converters, XGBoost, torch, transformers) are left out, which the table says.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import gpuprof
from bench.model_kinds import Kind
from bench.model_kinds.converted import CONVERTED
from bench.model_kinds.graphs import GRAPHS
from bench.model_kinds.networks import NETWORKS
from bench.model_kinds.pipelines import PIPELINES
from gpuprof.domain.sizes import describe_sizes
from gpuprof.errors import GpuprofError, InputError

KINDS = (*NETWORKS, *CONVERTED, *PIPELINES, *GRAPHS)
#: What the estimates are for: a GPU of which nothing here was measured.
GPU = "a100-80"
LOAD_S = 2.0
#: The rate asked for: at most this, and a fifth of what a core can do; the objective: at least this, twenty batches.
MOST_RPS, LEAST_SLO_MS, LOAD, SLO_FACTOR = 20.0, 1000.0, 0.2, 20.0
_BATCHES = (1, 2)
_ONLY_BATCH = re.compile(r"--batch (\d+)")


@dataclass(frozen=True)
class Outcome:
    """What became of a kind.

    Attributes
    ----------
    kind : str
    measured_ms : float or None
        Median latency of its smallest batch on one core.
    estimated_ms : float or None
        Predicted for `GPU` at that batch.
    batch : int or None
        Of the replica that was planned.
    answered, sent : int or None
        Requests of the load.
    remark : str
        Which step refused, and why; or what was assumed.
    """

    kind: str
    measured_ms: float | None = None
    estimated_ms: float | None = None
    batch: int | None = None
    answered: int | None = None
    sent: int | None = None
    remark: str = ""

    @property
    def is_served(self) -> bool:
        """Whether every request was answered."""
        return self.sent is not None and self.sent > 0 and self.answered == self.sent


def main() -> int:
    """Print the table; 0 when each kind was served, or refused with a reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[kind.name for kind in KINDS], help="kinds to take")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--models", type=Path, help="where the models are kept and found again; default: nowhere")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if not options.only or kind.name in options.only]
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as folder:
        outcomes = take_kinds(kinds, Path(folder), options.models or Path(folder))
    print(f"\n{render_table(outcomes)}\n")
    served = sum(one.is_served for one in outcomes)
    print(
        f"{served} of {len(outcomes)} served; {time.strftime('%Y-%m-%d', time.gmtime())}, gpuprof {gpuprof.__version__}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n", encoding="utf-8")
    return 0 if all(one.is_served or one.remark for one in outcomes) else 1


def take_kinds(kinds: Iterable[Kind], work: Path, models: Path) -> list[Outcome]:
    """Return what became of each kind.

    Parameters
    ----------
    work : Path
        Where the database is made.
    models : Path
        Where the models are written; one that is there is taken as it is.
    """
    models.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for kind in kinds:
        started = time.monotonic()
        path = models / f"{re.sub(r'[^a-z0-9]+', '-', kind.name.lower()).strip('-')}.onnx"
        try:
            if not path.exists():
                kind.build(path)
            outcome = take_model(kind, path, work / "db")
        except ImportError as error:
            outcome = Outcome(kind.name, remark=f"not written here: {error.name} is not installed")
        outcomes.append(outcome)
        became = "served" if outcome.is_served else outcome.remark
        print(f"{kind.name}: {became} ({time.monotonic() - started:.0f} s)", flush=True)
    return outcomes


def take_model(kind: Kind, path: Path, db: Path) -> Outcome:
    """Take one file through every step; what refuses ends it, but for the estimate."""
    measured_ms = estimated_ms = None
    batch = answered = sent = None
    remarks: list[str] = []
    step = "profile"
    try:
        batches, measured = profile_model(kind, path, db)
        measured_ms = measured
        if batches != _BATCHES:
            remarks.append(f"batch {batches[0]} alone")
        try:
            found = gpuprof.estimate([path], batches=batches[:1], device=GPU, db=db, dims=_sweep(kind))
            estimated_ms = found.estimates[0].latency_ms.value
            if unknown := found.estimates[0].unknown_ops:
                remarks.append(f"estimate: nothing is known of {', '.join(unknown)}")
        except GpuprofError as error:
            remarks.append(f"estimate: {_shorten(error, path)}")
        step = "place"
        dims = describe_sizes(tuple(sorted(kind.dims.items()))) or None
        rate_rps = min(MOST_RPS, LOAD * 1000.0 / measured)
        demand = gpuprof.Demand(str(path), rate_rps, gpuprof.Slo(max(LEAST_SLO_MS, SLO_FACTOR * measured)), dims=dims)
        plan = gpuprof.place([demand], db=db)
        if not plan.is_complete:
            return Outcome(kind.name, measured_ms, estimated_ms, remark=f"place: {' '.join(plan.notes)}")
        batch = _planned_batch(plan)
        step = "check"
        gpuprof.check(plan.deployment, db=db).raise_if_broken()
        step = "serve"
        with gpuprof.serve(plan.deployment, gpuprof.ServeSettings(port=0)) as server:
            step = "load"
            traffic = gpuprof.LoadTraffic(duration_s=LOAD_S, warmup_s=0.5, arrivals="constant")
            row = gpuprof.load(server.url, server.map, traffic=traffic).outcome.results[0]
        answered, sent = row.answered, row.sent
        if answered != sent:
            remarks.append(f"load: {row.failed} failed, {row.refused} refused, {row.lost} lost")
    except GpuprofError as error:
        remarks.append(f"{step}: {_shorten(error, path)}")
    return Outcome(kind.name, measured_ms, estimated_ms, batch, answered, sent, "; ".join(remarks))


def profile_model(kind: Kind, path: Path, db: Path) -> tuple[tuple[int, ...], float]:
    """Return the batches that were measured, those that a refusal names where it names any, and the first's latency."""
    settings = gpuprof.ProfileSettings(time_limit_s=0.3, keep_unstable=True, dims=_sweep(kind))
    batches: tuple[int, ...] = _BATCHES
    while True:
        try:
            result = gpuprof.profile([path], batches=batches, shares=("1core",), device="cpu", db=db, settings=settings)
        except GpuprofError as error:
            only = _ONLY_BATCH.search(error.fix)
            if only is None or batches == (int(only[1]),):
                raise
            batches = (int(only[1]),)
            continue
        if result.failures:
            raise InputError(result.failures[0])
        return batches, float(str(result.rows()[0]["latency_p50_ms"]))


def _sweep(kind: Kind) -> dict[str, Sequence[int]]:
    return {name: (size,) for name, size in kind.dims.items()}


def _planned_batch(plan: gpuprof.PlaceResult) -> int:
    return max(replica.batch for _, _, _, replica in plan.deployment.places())


def _shorten(error: GpuprofError, path: Path) -> str:
    """Return an error without the folder of the model."""
    return str(error).replace(f"{path.parent}/", "")


def render_table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table of Markdown."""
    lines = [
        f"| kind | CPU core ms | {GPU} ms | batch | answered | remark, or the step that refuses and why |",
        "|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        asked = "–" if one.sent is None else f"{one.answered} of {one.sent}"
        remark = one.remark.replace("|", "\\|")
        cells = [one.kind, _figure(one.measured_ms), _figure(one.estimated_ms), str(one.batch or "–"), asked, remark]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
