"""Workloads ruled out by measured failures, alone or together: at least the demand, and at most the resources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import FailedRun, TriedRuns, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.measured.measured import MeasuredModel
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ColocationRow, model_at_dims
from gpuprof.kernel_db.store import KernelDb

_LITTLE = 1e-9


def find_failure(device: Device, workload: Workload, failed: Iterable[FailedRun]) -> FailedRun | None:
    """Return a failure on ``device`` that ``workload`` dominates, None where there is none.

    It dominates with a batch and a number of processes that are no smaller, in memory that is no larger; and, unless
    memory was the cause of the failure, with no more compute units. The model's name is ignored.
    """
    return next((run for run in failed if not run.beside and _dominates(device, workload, run.workload, run)), None)


def _dominates(device: Device, workload: Workload, tried: Workload, run: FailedRun) -> bool:
    """Return whether ``workload`` demands at least as much as ``tried`` of ``run``, with at most its resources."""
    if workload.batch < tried.batch or workload.processes < tried.processes:
        return False
    try:
        if device.memory_bytes(workload.share) > device.memory_bytes(tried.share):
            return False
        parts = device.fraction(workload.share), device.fraction(tried.share)
    except InputError:  # an instance unknown to the device
        return False
    return run.is_memory or parts[0] <= parts[1] * (1.0 + _LITTLE)


def require_no_failure(device: Device, workload: Workload, failed: Iterable[FailedRun]) -> None:
    """Raise `InputError` with the failure where a failure rules the workload out."""
    failure = find_failure(device, workload, failed)
    if failure is None:
        return
    raise InputError(
        f"{workload.model} at batch {workload.batch} with {workload.processes} "
        f"{'process' if workload.processes == 1 else 'processes'} under {workload.share} is ruled out: {failure}",
        "choose a smaller batch, fewer processes or more memory, or measure it again if that was an accident",
    )


def require_success(model: str, device: Device, failed: Sequence[FailedRun]) -> None:
    """Raise `InputError` with the last failure where all measurements on a device failed."""
    if failed:
        raise InputError(
            f"every measurement of {model} on {device.name} failed, the last: {failed[-1]}",
            "profile it again, at a smaller batch or under a larger share",
        )


def require_no_failed_group(device: Device, workload: Workload, beside: Sequence[Workload], tried: TriedRuns) -> None:
    """Raise `InputError` with the failure where these workloads dominate a group that failed together.

    Each workload of the failed group must be dominated by a workload of its own.
    """
    running = (workload, *beside)
    if not beside or not tried.failed or (device.name, tuple(sorted(running))) in tried.together:
        return
    for run in tried.failed:
        if run.device == device.name and run.beside and _holds(device, running, (run.workload, *run.beside), run):
            names = " and ".join(neighbour.model for neighbour in beside)
            raise InputError(
                f"{workload.model} at batch {workload.batch} under {workload.share} beside {names} is ruled out: {run}",
                "put them on devices of their own, or measure them again if that was an accident",
            )


def _holds(device: Device, running: Sequence[Workload], members: Sequence[Workload], run: FailedRun) -> bool:
    """Return whether each member can be matched with a running workload of its own that dominates it."""
    if not members:
        return True
    first, *rest = members
    return any(
        workload.model == first.model
        and _dominates(device, workload, first, run)
        and _holds(device, (*running[:place], *running[place + 1 :]), rest, run)
        for place, workload in enumerate(running)
    )


_LABEL = re.compile(r"(?P<model>.+):(?P<batch>\d+):(?:(?P<mig>[^/:]+)/)?(?P<share>[0-9.e+-]+)%(?:x(?P<processes>\d+))?")


def parse_label(label: str) -> Workload:
    """Return the workload of a `gpuprof.kernel_db.schema.workload_label`. Raises `InputError` for other texts.

    Examples
    --------
    >>> workload = parse_label("bert:4:50%")
    >>> workload.model, workload.batch, workload.share.sm_pct
    ('bert', 4, 50.0)
    """
    match = _LABEL.fullmatch(label)
    if match is None:
        raise InputError(f"{label!r} does not say what ran beside", "model:batch:share%")
    share = Share(float(match["share"]), match["mig"])
    return Workload(match["model"], int(match["batch"]), share, int(match["processes"] or 1))


def read_groups(db: KernelDb, models: Mapping[str, MeasuredModel]) -> TriedRuns:
    """Return the groups of workloads that ran together, and that failed together.

    A failure is ignored if the same group ran later or in the same run. Runs of older files of ``models`` are ignored.
    """
    failed: dict[tuple[str, tuple[Workload, ...]], FailedRun] = {}
    run_ids: dict[tuple[str, tuple[Workload, ...]], str] = {}
    # Run ids begin with the time of their start.
    for row in sorted(read_records(db, ColocationRow), key=lambda row: row.run_id):
        name = model_at_dims(row.model, row.dims)
        current = None if name not in models else models[name].sha256
        if current is not None and row.model_sha256 not in (None, current):
            continue
        workload = Workload(name, row.batch, Share(row.sm_share_pct, row.mig_profile), row.processes)
        try:
            beside = tuple(parse_label(label) for label in row.beside.split(" + "))
        except InputError:  # labels of other tools, in another format
            continue
        key = (row.device, tuple(sorted((workload, *beside))))
        if row.error is None:
            run_ids[key] = row.run_id
            failed.pop(key, None)
        elif run_ids.get(key) != row.run_id:
            failed[key] = FailedRun(row.device, workload, row.error, beside)
            run_ids.pop(key, None)
    return TriedRuns(tuple(failed.values()), together=frozenset(run_ids))
