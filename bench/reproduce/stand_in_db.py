"""Writes kernel databases with what the papers' figures need and nobody published, computed from what was published.

    python -m bench.reproduce.stand_in_db FOLDER [--gpus v100,h100] [--step-pct 10]
    python -m bench.reproduce.stand_in_db FOLDER --instances DIRECTORY
    python -m bench.reproduce.stand_in_db FOLDER --igniter config.jsonl --gpus v100,t4

The first is of the V100 table of Elvinger's thesis (ETH, 2024, Table A.1). Times on other kinds of GPU are the V100's
by the ratio of float32 peaks. With ``--step-pct`` each batch stands under every multiple of that share, too: a share
smaller than the SMs that the batch keeps busy (WSM) stretches its time by the ratio of the two, a larger one costs
nothing. The thesis measures worse: resnet50 (batch 4, WSM 36%) under 17.55% takes four times as long (§6.2.1), bert
(batch 4, WSM 97%) under 31.83% five times (§6.2.2), where this says two and three times.

The second is of ParvaGPU's measurements in ``DIRECTORY``, of MIG instances: a process under a share by MPS runs as it
would in that part of the slices of the largest instance. Its throughput is on a line between the instances that were
measured with one process, and below the smallest in proportion to the share. An instance keeps its memory and its L2
to itself, a share by MPS does not.

The third is iGniter's own profile, and beside it for other kinds of GPU than the V100 coefficients where
``gpuprof calibrate`` keeps them (`scale_coefficients`).

All are asked by an estimator's name: the rows by ``--estimator usher``, for which whoever runs beside costs nothing,
or ``measured``, the coefficients by ``--estimator igniter``.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import numpy as np

from bench.igniter_profiles import DEVICE
from bench.parvagpu_profiles import read_latencies
from bench.published_measurements import import_published, keep_until_exit
from bench.v100_profiles import v100_profiles
from gpuprof.domain.catalogue import datasets, device
from gpuprof.domain.estimate import Estimator, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.igniter.igniter import WorkloadCoefficients
from gpuprof.estimators.igniter.igniter_estimator import Coefficients, IgniterEstimator
from gpuprof.estimators.igniter.profile import coefficients_path, write_coefficients
from gpuprof.kernel_db.importing import import_files
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id

#: The GPU of ParvaGPU's measurements, and the step of its shares by MPS in percent.
_INSTANCES_DEVICE, MPS_STEP_PCT = "a100-80", 2.5


def write_stand_ins(folder: Path, kinds: Sequence[str], step_pct: float | None = None) -> Path:
    """Write the database of the V100 table, a run for each kind of GPU, unless it is there, and return its folder.

    Parameters
    ----------
    step_pct : float or None
        Shares are the multiples of this; None: only whole devices.
    """
    if folder.exists():
        return folder
    v100 = device(v100_profiles().device)
    database = KernelDb.create(folder)
    for kind in kinds:
        ratio = v100.flops_per_s["float32"] / device(kind).flops_per_s["float32"]
        rows = [row for measured in _read_table() for row in _under_shares(measured, step_pct)]
        slower = [replace(row, latency_mean_ms=ratio * (row.latency_mean_ms or 0.0)) for row in rows]
        _append(database, kind, slower, "the V100's times by the ratio of float32 peaks, and by WSM under shares")
    return folder


def write_mps_stand_ins(folder: Path, directory: Path) -> Path:
    """Write the database of shares by MPS from ParvaGPU's measurements, unless it is there, and return its folder."""
    if not folder.exists():
        rows = [
            ModelRow("", one.model, _INSTANCES_DEVICE, one.batch, one.share.sm_pct, latency_mean_ms=time)
            for one, time in read_mps_latencies(directory).items()
        ]
        notes = "shares by MPS as parts of the slices of the largest MIG instance"
        _append(KernelDb.create(folder), _INSTANCES_DEVICE, rows, notes)
    return folder


def write_igniter_stand_ins(folder: Path, profile: Path, kinds: Sequence[str]) -> Path:
    """Import iGniter's profile, unless it is there, keep coefficients of other kinds, and return the folder.

    Raises
    ------
    InputError
        When the profile cannot be read, or the catalogue has no power limit of a kind.
    """
    if not folder.exists():
        database = KernelDb.create(folder)
        import_files(database, [profile])
        known = IgniterEstimator(database).coefficients(device(DEVICE))
        for kind in kinds:
            if kind != DEVICE:
                write_coefficients(coefficients_path(folder, kind), kind, *scale_coefficients(known, kind))
    return folder


@cache
def estimate_mps(directory: Path) -> Estimator:
    """Return what ``--estimator usher`` says of shares by MPS from ParvaGPU's measurements."""
    return make_estimator("usher", KernelDb(write_mps_stand_ins(keep_until_exit() / "db", directory)))


def read_mps_latencies(directory: Path) -> dict[Workload, float]:
    """Return the time of a batch of one process under each multiple of 2.5% by MPS, in ms."""
    steps = [MPS_STEP_PCT * number for number in range(1, round(100.0 / MPS_STEP_PCT) + 1)]
    return {
        Workload(model, batch, Share(pct)): _time_in_slices(batch, times, pct)
        for model, batches in _times_by_slices(directory).items()
        for batch, times in batches.items()
        for pct in steps
    }


@cache
def estimate_igniter(profile: Path, kinds: tuple[str, ...]) -> Estimator:
    """Return what ``--estimator igniter`` says of these kinds of GPU by iGniter's profile of the V100."""
    return make_estimator("igniter", KernelDb(write_igniter_stand_ins(keep_until_exit() / "db", profile, kinds)))


@cache
def estimate_shared_v100() -> Estimator:
    """Return what ``--estimator usher`` says of the V100 table under multiples of 2.5%."""
    folder = write_stand_ins(keep_until_exit() / "db", [DEVICE], MPS_STEP_PCT)
    return make_estimator("usher", KernelDb(folder))


def stretch_time_ms(model: str, batch: int, share_pct: float = 100.0) -> float:
    """Return the time of a batch on the V100 under any share, as ``--estimator usher`` has it from the rows.

    Raises
    ------
    InputError
        For a model or a batch beyond those measured.
    """
    rows = [row for row in _read_table() if row.model == model and row.wavg_sm_util_pct is not None]
    times = {one.batch: one.latency_mean_ms or 0.0 for row in rows for one in [_stretch(row, share_pct)]}
    if batch > max(times, default=0):
        raise InputError(f"{model} was not measured at batch {batch}")
    return float(np.interp(batch, sorted(times), [times[size] for size in sorted(times)]))


def scale_coefficients(known: Coefficients, kind: str) -> Coefficients:
    """Return a stand-in for another GPU: slower by the ratio of float32 peaks, all else in proportion to its power.

    Active times grow by the ratio; what a batch draws and the idle power are the same parts of the power limit, and
    the clock falls by as much for the same part too; a batch crowds the L2 as on the V100.

    Raises
    ------
    InputError
        When the catalogue has no power limit of the device.
    """
    own, other = device(DEVICE), device(kind)
    slower = own.flops_per_s["float32"] / other.flops_per_s["float32"]
    if own.max_power_w is None or other.max_power_w is None:
        raise InputError(f"the catalogue has no power limit of {kind}")
    power, (v100, workloads) = other.max_power_w / own.max_power_w, known
    hardware = replace(
        v100, max_power_w=v100.max_power_w * power, idle_power_w=v100.idle_power_w * power, alpha_f=v100.alpha_f / power
    )
    return hardware, {name: _slow_down(one, slower, power) for name, one in workloads.items()}


def _slow_down(one: WorkloadCoefficients, slower: float, power: float) -> WorkloadCoefficients:
    k1, k2, k3, k4, k5 = one.active
    return replace(
        one,
        active=(k1 * slower, k2 * slower, k3 * slower, k4, k5 * slower),
        power=(one.power[0] * slower * power, one.power[1] * power),
        l2=(one.l2[0] * slower, one.l2[1]),
    )


def _append(database: KernelDb, kind: str, rows: Sequence[ModelRow], notes: str) -> None:
    now = datetime.now(UTC)
    run = RunRow(
        run_id=new_run_id(now),
        started_at=now,
        device=kind,
        collector="stand-in",
        model="",
        notes=f"no measurement: {notes}",
    )
    database.append(Run(run, models=[replace(row, run_id=run.run_id, device=kind) for row in rows]))


@cache
def _read_table() -> list[ModelRow]:
    return read_records(import_published(Path(str(datasets() / "v100_profiles.csv"))), ModelRow)


def _under_shares(measured: ModelRow, step_pct: float | None) -> Iterator[ModelRow]:
    """Yield a row of the table as it is, or under each share; nothing where its time, or for shares its WSM, lacks."""
    if measured.latency_mean_ms is not None and step_pct is None:
        yield replace(measured, throughput_rps=None)
    elif measured.latency_mean_ms is not None and step_pct is not None and measured.wavg_sm_util_pct is not None:
        for number in range(1, round(100.0 / step_pct) + 1):
            yield _stretch(measured, step_pct * number)


def _stretch(measured: ModelRow, share_pct: float) -> ModelRow:
    """Return a row under a share, without its requirements, which shares of their size would be said to meet."""
    stretched_ms = (measured.latency_mean_ms or 0.0) * max(1.0, (measured.wavg_sm_util_pct or 0.0) / share_pct)
    return replace(
        measured,
        sm_share_pct=share_pct,
        latency_mean_ms=stretched_ms,
        throughput_rps=None,
        max_occupancy_pct=None,
        wavg_occupancy_pct=None,
        wavg_sm_util_pct=None,
    )


def _times_by_slices(directory: Path) -> Mapping[str, Mapping[int, Mapping[int, float]]]:
    """Return model → batch → slices → ms of one process, of the batches that the largest instance holds."""
    found: defaultdict[str, defaultdict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for workload, time in read_latencies(directory).items():
        if workload.processes == 1:
            slices = int(str(workload.share.mig).partition("g")[0])
            found[workload.model][workload.batch][slices] = time
    most = {model: max(max(times) for times in batches.values()) for model, batches in found.items()}
    return {m: {b: t for b, t in batches.items() if most[m] in t} for m, batches in found.items()}


def _time_in_slices(batch: int, times: Mapping[int, float], share_pct: float) -> float:
    """Return the time of a batch in a part of the slices: throughput is linear between those measured, and from 0."""
    slices = share_pct / 100.0 * max(times)
    rates = {0: 0.0, **{size: batch / ms for size, ms in sorted(times.items())}}
    low = max(size for size in rates if size < slices)
    high = min(size for size in rates if size >= slices - 1e-9)
    weight = (slices - low) / (high - low)
    return batch / (rates[low] + weight * (rates[high] - rates[low]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the database that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", default=DEVICE)
    parser.add_argument("--step-pct", type=float)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--instances", type=Path, help="folder of ParvaGPU's measurements")
    source.add_argument("--igniter", type=Path, help="iGniter's profile")
    chosen = parser.parse_args(arguments)
    kinds = chosen.gpus.split(",")
    if chosen.instances is not None:
        write_mps_stand_ins(chosen.folder, chosen.instances)
    elif chosen.igniter is not None:
        write_igniter_stand_ins(chosen.folder, chosen.igniter, kinds)
    else:
        write_stand_ins(chosen.folder, kinds, chosen.step_pct)
    return 0


if __name__ == "__main__":
    sys.exit(main())
