"""Takes models of many kinds from their files to a server, and prints what became of each.

    python -m bench.model_families [--odd] [--only NAME ...] [--limit SECONDS] [--json FILE] [--models DIRECTORY]
                                   [--files FILE ...]

Each kind is written as its users' tools write it (`bench.model_kinds`), then profiled on this machine's CPU, estimated
for a GPU, planned onto this machine, checked, served and asked for answers, each by the command that a user would
type. Where one refuses, the table has its reason; a kind that has not come to an end within the limit is given up, and
the table has the command that was running. It takes minutes. `--odd` takes what ONNX allows and few exporters
write, and files that something happened to, instead (`bench.model_kinds.odd`). Kinds whose writer is not installed
(scikit-learn's converters, XGBoost, torch, transformers) are left out, which the table says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
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
#: For all commands of a kind together.
LIMIT_S = 300.0
#: What a command that is told to end may take to end what it started.
_ENDING_S = 20.0
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
    is_retry_limit_reached : bool
        Whether the limit ended it.
    took_s : float
        All commands together, on the machine as it was.
    """

    kind: str
    measured_ms: float | None = None
    estimated_ms: float | None = None
    batch: int | None = None
    answered: int | None = None
    sent: int | None = None
    remark: str = ""
    is_retry_limit_reached: bool = False
    took_s: float = 0.0

    @property
    def is_served(self) -> bool:
        """Whether every request was answered."""
        return self.sent is not None and self.sent > 0 and self.answered == self.sent

    @property
    def is_settled(self) -> bool:
        """Whether it is served, or refused with a reason that is no bug of gpuprof."""
        return "bug: " not in self.remark and not self.is_retry_limit_reached and (self.is_served or bool(self.remark))

    @property
    def became(self) -> str:
        """How far it came, in a word or two."""
        if self.is_served:
            return "served"
        if self.is_retry_limit_reached:
            return "too slow"
        reached = "planned" if self.batch is not None else "measured" if self.measured_ms is not None else ""
        return f"{reached}, refused later" if reached else "refused" if self.remark else "nothing"


def main() -> int:
    """Print the table; 0 when each kind was served, or refused with a reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[kind.name for kind in (*KINDS, *ODD)], help="kinds to take")
    parser.add_argument("--odd", action="store_true", help="odd models and broken files, instead of the usual kinds")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for a kind; default: {LIMIT_S:g}")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--models", type=Path, help="where the models are kept and found again; default: nowhere")
    parser.add_argument("--files", nargs="*", type=Path, default=[], help="ONNX files of your own to take, too")
    options = parser.parse_args()
    usual = ODD if options.odd else () if options.files else KINDS
    kinds = list(usual) if options.only is None else [kind for kind in (*KINDS, *ODD) if kind.name in options.only]
    kinds += [Kind(file.name, partial(shutil.copyfile, file)) for file in options.files]
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as folder:
        outcomes = take_kinds(kinds, Path(folder), options.models or Path(folder), options.limit)
    print(f"\n{render_table(outcomes)}\n")
    counts = ", ".join(f"{count} {became}" for became, count in Counter(one.became for one in outcomes).most_common())
    day = time.strftime("%Y-%m-%d", time.gmtime())
    print(f"{len(outcomes)} kinds: {counts}; limit {options.limit:g} s a kind; {day}, gpuprof {gpuprof.__version__}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n", encoding="utf-8")
    return 0 if all(one.is_settled for one in outcomes) else 1


def take_kinds(kinds: Iterable[Kind], work: Path, models: Path, limit_s: float = LIMIT_S) -> list[FamilyOutcome]:
    """Return what became of each kind.

    Parameters
    ----------
    work : Path
        Where the commands run, which make the database there.
    models : Path
        Where the models are written; one that is there is taken as it is.
    limit_s : float
        For all commands of a kind together, once its file is written.
    """
    models.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for kind in kinds:
        path = models / f"{re.sub(r'[^a-z0-9]+', '-', kind.name.lower()).strip('-')}.onnx"
        try:
            if not path.exists():
                kind.build(path)
            started = time.monotonic()
            outcome = take_model(kind, path.absolute(), Commands(work, started + limit_s))
            outcome = replace(outcome, took_s=time.monotonic() - started)
        except ImportError as error:
            outcome = FamilyOutcome(kind.name, remark=f"not written here: {error.name} is not installed")
        outcomes.append(outcome)
        print(f"{kind.name}: {outcome.became} ({outcome.took_s:.0f} s) {outcome.remark}".rstrip(), flush=True)
    return outcomes


class CommandRefusedError(Exception):
    """A command of gpuprof ended with an exit code that says so; its text has the verb and what was said."""


class CommandTooSlowError(CommandRefusedError):
    """A command had not ended when the time of its kind was over."""


@dataclass(frozen=True)
class Commands:
    """Commands of gpuprof in a folder, up to a point of the monotonic clock (seconds)."""

    work: Path
    ends_at: float

    @property
    def left_s(self) -> float:
        """What is left of the time; a little at least, so that what was started is ended."""
        return max(0.01, self.ends_at - time.monotonic())

    def run(self, *words: str, accepted: Sequence[int] = (0,)) -> str:
        """Run ``gpuprof`` and return what it printed; ``accepted`` are the exit codes that refuse nothing.

        Raises
        ------
        CommandRefusedError, CommandTooSlowError
            When it refuses, or does not end in time.
        """
        with self.start(*words) as process:
            given = self.left_s
            try:
                printed, said = process.communicate(timeout=given)
            except subprocess.TimeoutExpired:
                end_command(process)
                raise CommandTooSlowError(f"{words[0]}: it did not end in the {given:.3g} s that were left") from None
        if process.returncode not in accepted:
            raise CommandRefusedError(f"{words[0]}: {_last_line(said) or f'exit code {process.returncode}'}")
        return printed

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start ``gpuprof`` as the first of a group of processes."""
        return subprocess.Popen(
            [sys.executable, "-m", "gpuprof", *words],
            cwd=self.work,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def end_command(process: subprocess.Popen[str]) -> None:
    """Tell a command to end, which ends what it started, and end by force what is then left of its group."""
    process.terminate()
    try:
        process.communicate(timeout=_ENDING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def take_model(kind: Kind, path: Path, commands: Commands) -> FamilyOutcome:
    """Take one file through every command; what refuses ends it, but for the estimate."""
    outcome = FamilyOutcome(kind.name)
    remarks: list[str] = []
    dims = [word for name, size in kind.dims.items() for word in ("--dim", f"{name}={size}")]
    is_retry_limit_reached = False
    try:
        first = profile_model(path, commands, dims)
        outcome = replace(outcome, measured_ms=float(first["latency_p50_ms"]))
        if not first["is_swept"]:
            remarks.append(f"batch {first['batch']} alone")
        try:
            asked = ["--batch", str(first["batch"]), "--device", GPU, "--json", *dims]
            (found,) = json.loads(commands.run("estimate", str(path), *asked))
            outcome = replace(outcome, estimated_ms=found["latency_ms"])
            if unknown := found["unknown_ops"]:
                remarks.append(f"estimate: nothing is known of {', '.join(unknown)}")
        except CommandTooSlowError:
            raise
        except CommandRefusedError as error:
            remarks.append(_shorten(error, path))
        write_demand(kind, path, float(first["latency_p50_ms"]), commands.work / "slo.csv")
        plan = json.loads(commands.run("place", "--slo-file", "slo.csv", "-o", "map.json", "--json"))
        outcome = replace(outcome, batch=max(replica["batch"] for replica in plan["replicas"]))
        commands.run("check", "map.json")
        row = load_model(commands)
        outcome = replace(outcome, answered=row["answered"], sent=row["sent"])
        if row["answered"] != row["sent"]:
            remarks.append(f"load: {row['failed']} failed, {row['refused']} refused, {row['lost']} lost")
    except CommandRefusedError as error:
        is_retry_limit_reached = isinstance(error, CommandTooSlowError)
        remarks.append(_shorten(error, path))
    return replace(outcome, remark="; ".join(remarks), is_retry_limit_reached=is_retry_limit_reached)


def profile_model(path: Path, commands: Commands, dims: Sequence[str]) -> dict[str, Any]:
    """Return the row of the smallest batch that ``profile`` measures when it is told none, on a core.

    ``is_swept`` says whether there were other batches, too.
    """
    options = ["--share", "1core", "--device", "cpu", "--time-limit", "0.3", "--keep-unstable", "--json", *dims]
    # 2: the machine is too noisy for the figures, which stands in them; here what runs at all is looked at.
    rows = json.loads(commands.run("profile", str(path), *options, accepted=(0, 2)))
    return {**rows[0], "is_swept": len(rows) > 1}


def write_demand(kind: Kind, path: Path, measured_ms: float, file: Path) -> None:
    """Write slo.csv with one service that a core can answer."""
    rate_rps = min(MOST_RPS, LOAD * 1000.0 / measured_ms)
    slo_ms = max(LEAST_SLO_MS, SLO_FACTOR * measured_ms)
    dims = describe_sizes(kind.dims.items()).replace(",", ";")  # commas are between columns
    file.write_text(f"model,rate_rps,slo_ms,dims\n{path},{rate_rps:.6g},{slo_ms:.6g},{dims}\n", encoding="utf-8")


def load_model(commands: Commands) -> dict[str, Any]:
    """Serve ``map.json`` and return the row of ``load``."""
    with commands.start("serve", "map.json", "--port", "0") as server:
        assert server.stdout is not None and server.stderr is not None
        limit = threading.Timer(commands.left_s, server.terminate)
        limit.start()
        try:
            url = _ADDRESS.search(server.stdout.readline())
            if url is None:
                if time.monotonic() >= commands.ends_at:
                    raise CommandTooSlowError("serve: it was not ready in time")
                raise CommandRefusedError(f"serve: {_last_line(server.stderr.read())}")
            traffic = ["--duration", f"{LOAD_S:g}", "--warmup", "0.5", "--arrivals", "constant", "--json"]
            row: dict[str, Any] = json.loads(commands.run("load", url[0], "--map", "map.json", *traffic))[0]
            return row
        finally:
            limit.cancel()
            end_command(server)


def _last_line(said: str) -> str:
    """Return the last line of a command's errors, without its name."""
    lines = [line.removeprefix("gpuprof: ") for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _shorten(error: CommandRefusedError, path: Path) -> str:
    """Return an error without the folder of the model."""
    return str(error).replace(f"{path.parent}/", "")


def render_table(outcomes: Sequence[FamilyOutcome]) -> str:
    """Return the outcomes as a table of Markdown."""
    lines = [
        f"| kind | became | CPU core ms | {GPU} ms | batch | answered | remark, or the step that refuses and why |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        asked = "–" if one.sent is None else f"{one.answered} of {one.sent}"
        remark = one.remark.replace("|", "\\|")
        figures = [_figure(one.measured_ms), _figure(one.estimated_ms), str(one.batch or "–"), asked]
        cells = [one.kind, one.became, *figures, remark]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
