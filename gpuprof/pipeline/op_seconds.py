"""Measured times of models' ops on a device, for predictions of the gain of a merge."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.kernel_db.records import read_records

if TYPE_CHECKING:
    from gpuprof.domain.device import Device
    from gpuprof.kernel_db.store import KernelDb


@dataclass(frozen=True, slots=True)
class _OpTime:
    model_sha256: str | None
    name: str
    position: int
    batch: int
    sm_share_pct: float
    duration_p50_ns: int | None
    run_id: str


def read_op_seconds(
    db: KernelDb | None, device: Device, models: Sequence[Path]
) -> dict[tuple[str, str], dict[int, float]]:
    """Return the seconds of each op by its rows, for each pair of a model file's sha256 and the op's name there.

    Of several shares of the device the largest is used; of several runs the last. An op that the runtime fused into
    another takes no time itself. Empty where no op was measured, or the files are missing or changed.
    """
    if db is None:
        return {}
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in models if path.is_file()}
    where = {"device": device.name, "model_sha256": sorted(digests), "mig_profile": None}
    rows = read_records(db, _OpTime, where, table="ops")
    largest = max((row.sm_share_pct for row in rows), default=0.0)
    measured = {(row.run_id, row.model_sha256, row.batch) for row in rows if row.duration_p50_ns}
    places: dict[tuple[str, str], set[int]] = {}
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row.sm_share_pct == largest and (row.run_id, row.model_sha256, row.batch) in measured:
            key = (row.model_sha256 or "", row.name)
            places.setdefault(key, set()).add(row.position)
            curves.setdefault(key, {})[row.batch] = (row.duration_p50_ns or 0) * 1e-9
    return {key: curve for key, curve in curves.items() if len(places[key]) == 1}  # names with an unambiguous op
