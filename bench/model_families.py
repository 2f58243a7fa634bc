"""Takes models of many kinds from their files to a server, and prints what became of each.

    python -m bench.model_families [--odd] [--only NAME ...] [--json FILE] [--models DIRECTORY] [--files FILE ...]

Each kind is written as its users' tools write it (`bench.model_kinds`), then profiled on this machine's CPU, estimated
for a GPU, planned onto this machine, checked, served and asked for answers, each by the command that a user would
type. Where one refuses, the table has its reason. It takes minutes. `--odd` takes what ONNX allows and few exporters
write, and files that something happened to, instead (`bench.model_kinds.odd`). Kinds whose writer is not installed
(scikit-learn's converters, XGBoost, torch, transformers) are left out, which the table says.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpuprof
from bench.model_kinds import Kind
from bench.model_kinds.converted import CONVERTED
from bench.model_kinds.graphs import GRAPHS
from bench.model_kinds.networks import NETWORKS
from bench.model_kinds.odd import ODD
from bench.model_kinds.pipelines import PIPELINES
from gpuprof.domain.sizes import describe_sizes

KINDS = (*NETWORKS, *CONVERTED, *PIPELINES, *GRAPHS)
#: What the estimates are for: a GPU of which nothing here was measured.
GPU = "a100-80"
LOAD_S = 2.0
#: The rate asked for: at most this, and a fifth of what a core can do; the objective: at least this, twenty batches.
MOST_RPS, LEAST_SLO_MS, LOAD, SLO_FACTOR = 20.0, 1000.0, 0.2, 20.0
_LIMIT_S = 300.0
_ADDRESS = re.compile(r"http://\S+")


@dataclass(frozen=True)
class FamilyOutcome:
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

    @property
    def is_settled(self) -> bool:
        """Whether it is served, or refused with a reason that is no bug of gpuprof."""
        return "bug: " not in self.remark and (self.is_served or bool(self.remark))


def main() -> int:
    """Print the table; 0 when each kind was served, or refused with a reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[kind.name for kind in (*KINDS, *ODD)], help="kinds to take")
    parser.add_argument("--odd", action="store_true", help="odd models and broken files, instead of the usual kinds")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--models", type=Path, help="where the models are kept and found again; default: nowhere")
    parser.add_argument("--files", nargs="*", type=Path, default=[], help="ONNX files of your own to take, too")
    options = parser.parse_args()
    usual = ODD if options.odd else () if options.files else KINDS
    kinds = list(usual) if options.only is None else [kind for kind in (*KINDS, *ODD) if kind.name in options.only]
    kinds += [Kind(file.name, partial(shutil.copyfile, file)) for file in options.files]
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as folder:
        outcomes = take_kinds(kinds, Path(folder), options.models or Path(folder))
    print(f"\n{render_table(outcomes)}\n")
    served = sum(one.is_served for one in outcomes)
    print(
        f"{served} of {len(outcomes)} served; {time.strftime('%Y-%m-%d', time.gmtime())}, gpuprof {gpuprof.__version__}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n", encoding="utf-8")
    return 0 if all(one.is_settled for one in outcomes) else 1


def take_kinds(kinds: Iterable[Kind], work: Path, models: Path) -> list[FamilyOutcome]:
    """Return what became of each kind.

    Parameters
    ----------
    work : Path
        Where the commands run, which make the database there.
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
            outcome = take_model(kind, path.absolute(), work)
        except ImportError as error:
            outcome = FamilyOutcome(kind.name, remark=f"not written here: {error.name} is not installed")
        outcomes.append(outcome)
        became = "served" if outcome.is_served else outcome.remark
        print(f"{kind.name}: {became} ({time.monotonic() - started:.0f} s)", flush=True)
    return outcomes


def take_model(kind: Kind, path: Path, work: Path) -> FamilyOutcome:
    """Take one file through every command; what refuses ends it, but for the estimate."""
    measured_ms = estimated_ms = None
    batch = answered = sent = None
    remarks: list[str] = []
    dims = [word for name, size in kind.dims.items() for word in ("--dim", f"{name}={size}")]
    try:
        first = profile_model(path, work, dims)
        measured_ms = float(first["latency_p50_ms"])
        if not first["is_swept"]:
            remarks.append(f"batch {first['batch']} alone")
        try:
            asked = ["--batch", str(first["batch"]), "--device", GPU, "--json", *dims]
            (found,) = json.loads(run_command(work, "estimate", str(path), *asked))
            estimated_ms = found["latency_ms"]
            if unknown := found["unknown_ops"]:
                remarks.append(f"estimate: nothing is known of {', '.join(unknown)}")
        except CommandRefusedError as error:
            remarks.append(_shorten(error, path))
        write_demand(kind, path, measured_ms, work / "slo.csv")
        plan = json.loads(run_command(work, "place", "--slo-file", "slo.csv", "-o", "map.json", "--json"))
        batch = max(replica["batch"] for replica in plan["replicas"])
        run_command(work, "check", "map.json")
        row = load_model(work)
        answered, sent = row["answered"], row["sent"]
        if answered != sent:
            remarks.append(f"load: {row['failed']} failed, {row['refused']} refused, {row['lost']} lost")
    except CommandRefusedError as error:
        remarks.append(_shorten(error, path))
    return FamilyOutcome(kind.name, measured_ms, estimated_ms, batch, answered, sent, "; ".join(remarks))


class CommandRefusedError(Exception):
    """A command of gpuprof ended with an exit code that says so; its text has the verb and what was said."""


def run_command(work: Path, *words: str, accepted: Sequence[int] = (0,)) -> str:
    """Run ``gpuprof`` in a folder and return what it printed; ``accepted`` are the exit codes that refuse nothing.

    Raises
    ------
    CommandRefusedError
        When it refuses, or does not end.
    """
    command = [sys.executable, "-m", "gpuprof", *words]
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CommandRefusedError(f"{words[0]}: it did not end within {_LIMIT_S:g} s") from None
    if done.returncode not in accepted:
        said = [line.removeprefix("gpuprof: ") for line in done.stderr.splitlines() if line.strip()]
        raise CommandRefusedError(f"{words[0]}: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def profile_model(path: Path, work: Path, dims: Sequence[str]) -> dict[str, Any]:
    """Return the row of the smallest batch that ``profile`` measures when it is told none, on a core.

    ``is_swept`` says whether there were other batches, too.
    """
    options = ["--share", "1core", "--device", "cpu", "--time-limit", "0.3", "--keep-unstable", "--json", *dims]
    # 2: the machine is too noisy for the figures, which stands in them; here what runs at all is looked at.
    rows = json.loads(run_command(work, "profile", str(path), *options, accepted=(0, 2)))
    return {**rows[0], "is_swept": len(rows) > 1}


def write_demand(kind: Kind, path: Path, measured_ms: float, file: Path) -> None:
    """Write slo.csv with one service that a core can answer."""
    rate_rps = min(MOST_RPS, LOAD * 1000.0 / measured_ms)
    slo_ms = max(LEAST_SLO_MS, SLO_FACTOR * measured_ms)
    dims = describe_sizes(tuple(sorted(kind.dims.items()))) or ""
    file.write_text(f"model,rate_rps,slo_ms,dims\n{path},{rate_rps:.6g},{slo_ms:.6g},{dims}\n", encoding="utf-8")


def load_model(work: Path) -> dict[str, Any]:
    """Serve ``map.json`` and return the row of ``load``."""
    command = [sys.executable, "-m", "gpuprof", "serve", "map.json", "--port", "0"]
    with subprocess.Popen(
        command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            url = _ADDRESS.search(server.stdout.readline())
            if url is None:
                raise CommandRefusedError(f"serve: {server.stderr.read().strip().splitlines()[-1]}")
            traffic = ["--duration", f"{LOAD_S:g}", "--warmup", "0.5", "--arrivals", "constant", "--json"]
            row: dict[str, Any] = json.loads(run_command(work, "load", url[0], "--map", "map.json", *traffic))[0]
            return row
        finally:
            server.terminate()
            server.communicate(timeout=_LIMIT_S)


def _shorten(error: CommandRefusedError, path: Path) -> str:
    """Return an error without the folder of the model."""
    return str(error).replace(f"{path.parent}/", "")


def render_table(outcomes: Sequence[FamilyOutcome]) -> str:
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
