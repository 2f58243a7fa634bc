"""Groups of workloads run at once in the kernel database: those that ran, and those that failed together."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuprof.domain.estimate import FailedRun, TriedRuns, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.measured.measured import MeasuredModel
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ColocationRow, model_at_dims
from gpuprof.kernel_db.store import KernelDb

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
