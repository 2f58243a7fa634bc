"""Writes a kernel database with what USHER's figures need and nobody published, computed from the thesis's V100 table.

    python -m bench.reproduce.stand_in_db FOLDER [--gpus v100,h100] [--step-pct 10]

Times on other kinds of GPU are the V100's by the ratio of float32 peaks. With ``--step-pct`` each batch stands under
every multiple of that share, too: a share smaller than the SMs that the batch keeps busy (WSM) stretches its time by
the ratio of the two, a larger one costs nothing. The thesis measures worse under shares (see `shared_v100`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from bench.published_measurements import import_published
from gpuprof.domain.catalogue import datasets, device, v100_profiles
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id


def write_stand_ins(folder: Path, kinds: Sequence[str], step_pct: float | None = None) -> Path:
    """Write the database, a run for each kind of GPU, unless it is there, and return its folder.

    Parameters
    ----------
    step_pct : float or None
        Shares are the multiples of this; None: only whole devices.
    """
    if folder.exists():
        return folder
    table = read_records(import_published(Path(str(datasets() / "v100_profiles.csv"))), ModelRow)
    v100 = device(v100_profiles().device)
    database = KernelDb.create(folder)
    for kind in kinds:
        ratio = v100.flops_per_s["float32"] / device(kind).flops_per_s["float32"]
        now = datetime.now(UTC)
        run = RunRow(
            run_id=new_run_id(now),
            started_at=now,
            device=kind,
            collector="stand-in",
            model="",
            notes="no measurement: the V100's times by the ratio of float32 peaks, and by WSM under shares",
        )
        rows = [row for measured in table for row in _under_shares(measured, step_pct)]
        models = [
            replace(row, run_id=run.run_id, device=kind, latency_mean_ms=ratio * (row.latency_mean_ms or 0.0))
            for row in rows
        ]
        database.append(Run(run, models=models))
    return folder


def _under_shares(measured: ModelRow, step_pct: float | None) -> list[ModelRow]:
    """Return a row of the table as it is, or under each share; nothing where its time, or for shares its WSM, lacks."""
    alone_ms, busy_pct = measured.latency_mean_ms, measured.wavg_sm_util_pct
    alone = replace(measured, throughput_rps=None)
    if alone_ms is None or (step_pct is not None and busy_pct is None):
        return []
    if step_pct is None or busy_pct is None:
        return [alone]
    # Without its requirements nobody takes a batch to be as quick under a share that holds them as alone.
    alone = replace(alone, max_occupancy_pct=None, wavg_occupancy_pct=None, wavg_sm_util_pct=None)
    shares = [step_pct * number for number in range(1, round(100.0 / step_pct) + 1)]
    return [replace(alone, sm_share_pct=one, latency_mean_ms=alone_ms * max(1.0, busy_pct / one)) for one in shares]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the database that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", default="v100")
    parser.add_argument("--step-pct", type=float)
    chosen = parser.parse_args(arguments)
    write_stand_ins(chosen.folder, chosen.gpus.split(","), chosen.step_pct)
    return 0


if __name__ == "__main__":
    sys.exit(main())
