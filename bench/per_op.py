"""Per-op profiling of zoo models: each distinct op once, killed and resumed, and a model whose ops are known.

    python -m bench.per_op [--models squeezenet,resnet50,densenet121,inception_v1,inception_v2] [--batch 1,4,16]

Builds the models, profiles all but the last with `gpuprof profile --per-op`, killing it with SIGKILL on the way, and
then the last one twice: beside the others' database, and into an empty one. Prints distinct ops and seconds.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = "squeezenet,densenet121,inception_v1,inception_v2,resnet50"
KILL_AFTER_S = 15.0


def main() -> None:
    """Build, profile, kill, resume, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batch", default="1,4,16")
    options = parser.parse_args()
    names = options.models.split(",")
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        for name in names:
            subprocess.run(
                [sys.executable, "-m", "gpuprof", "zoo", "build", name, "-o", f"{name}.onnx"], cwd=here, check=True
            )
        print(f"{'':44}{'ops':>7}{'measured':>10}{'seconds':>9}")
        kill_profiling(here, "shared", names[:-1], options.batch)
        show("the first models, killed and gone on", here, "shared", names[:-1], options.batch)
        show("the same again", here, "shared", names[:-1], options.batch)
        copy = f"{names[-1]}-again"
        (here / f"{copy}.onnx").write_bytes((here / f"{names[-1]}.onnx").read_bytes())
        show(f"{names[-1]}, one more model", here, "shared", [names[-1]], options.batch)
        show(f"{copy}, all of whose ops are known", here, "shared", [copy], options.batch)
        show(f"{copy}, into an empty database", here, "empty", [copy], options.batch)


def command(database: str, models: list[str], batch: str) -> list[str]:
    """Return the command that profiles ``models`` op by op."""
    files = [f"{model}.onnx" for model in models]
    return [
        sys.executable,
        "-m",
        "gpuprof",
        "profile",
        *files,
        "--per-op",
        "--batch",
        batch,
        "--share",
        "1core",
        "--db",
        database,
        "--json",
    ]


def kill_profiling(here: Path, database: str, models: list[str], batch: str) -> None:
    """Start profiling and kill it on the way."""
    with subprocess.Popen(
        command(database, models, batch), cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
    print(f"killed with SIGKILL after {KILL_AFTER_S:g} s", flush=True)


def show(what: str, here: Path, database: str, models: list[str], batch: str) -> None:
    """Profile and print how many ops there are, how many were measured now, and the seconds it took."""
    start = time.monotonic()
    done = subprocess.run(
        command(database, models, batch), cwd=here, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    rows = json.loads(done.stdout)
    now = sum(row["measured_now"] for row in rows)
    print(f"{what:44}{len(rows):7}{now:10}{time.monotonic() - start:9.1f}", flush=True)


if __name__ == "__main__":
    main()
