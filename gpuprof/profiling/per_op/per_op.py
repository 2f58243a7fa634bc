"""Measures each distinct op of many models once, as a single-op model, and stores the result.

This is USHER's way of profiling (section 4.1: operators, not models). A single op finds its weights in the cache more
often than within its model, and is not fused: its time differs from its part of the model's time.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError
from gpuprof.kernel_db.compaction import compact_if_due
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import PER_OP, KernelRow, OpRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
from gpuprof.profiling.collector import Collector
from gpuprof.profiling.cpu.op_rows import op_facts
from gpuprof.profiling.per_op.op_backend import Observation, op_backend
from gpuprof.profiling.per_op.op_model import OpSource, distinct_ops, write_op_model
from gpuprof.profiling.sweep.campaign import machine_columns
from gpuprof.profiling.sweep.planning import NamedModel
from gpuprof.profiling.worker.tasks import Resident
from gpuprof.runtime.executed_variant import executed_variant

#: Most time lost by a killed campaign; a run per op would create thousands of directories.
_KEEP_EVERY_S = 3.0


@dataclass(frozen=True, slots=True)
class OpOutcome:
    """Row of an op in the database."""

    row: OpRow
    measured_now: bool


@dataclass(slots=True)
class _PendingRows:
    run_id: str
    started_at: datetime
    since: float = field(default_factory=time.monotonic)
    ops: list[OpRow] = field(default_factory=list)
    kernels: list[KernelRow] = field(default_factory=list)


class OpProfiler:
    """Measures ops on a device under a share into a database.

    ``collector``: its versions are the key of earlier results; ``force``: measure again despite earlier results.
    """

    def __init__(
        self, database: KernelDb, device: Device, collector: Collector, share: Share, force: bool = False
    ) -> None:
        self.database = database
        self.device = device
        self.collector = collector
        self.share = share
        self.force = force
        self._backend = op_backend(device, share)

    def pending(self, models: Iterable[NamedModel], batches: Sequence[int]) -> tuple[list[OpSource], list[OpOutcome]]:
        """Return the distinct ops still to be measured, and the known outcomes of the others."""
        sources: dict[str, OpSource] = {}
        for model in models:
            for batch in batches:
                # Earlier entries win: the first model with an op names it.
                sources = {**distinct_ops(model.path, batch, model.name, model.sizes), **sources}
        rows = {} if self.force else self._read_known()
        missing = [source for signature, source in sources.items() if signature not in rows]
        return missing, [OpOutcome(rows[signature], False) for signature in sources if signature in rows]

    def run(self, sources: Sequence[OpSource]) -> Iterator[OpOutcome]:
        """Measure ``sources`` and yield each outcome; results are stored every few seconds.

        An op that cannot run alone, or that crashes the child process, is stored with the reason. Raises
        `UnavailableError` when the share cannot be enforced here.
        """
        pending = self._new_pending_rows()
        try:
            for source, observation in self._measure(sources):
                row = self._row(pending.run_id, source, observation)
                variant = self._variant(source)
                row = replace(row, **variant)
                pending.ops.append(row)
                pending.kernels += [replace(kernel, run_id=pending.run_id, **variant) for kernel in observation.kernels]
                yield OpOutcome(row, True)
                if time.monotonic() - pending.since > _KEEP_EVERY_S:
                    self._store_rows(pending)
                    pending = self._new_pending_rows()
        finally:
            self._store_rows(pending)

    def _measure(self, sources: Sequence[OpSource]) -> Iterator[tuple[OpSource, Observation]]:
        with tempfile.TemporaryDirectory(prefix="gpuprof-") as name:
            model = Path(name, "op.onnx")
            waiting = list(sources)
            while waiting:
                # A single process serves all ops, until an op ends it: starting a process takes longer than an op.
                with self._backend.start() as worker:
                    worker.call(Resident.unload)  # an error of the share is raised here
                    while waiting and worker.is_alive:
                        source = waiting.pop(0)
                        try:
                            feeds = write_op_model(source, model)
                            observation = self._backend.measure(worker, source, model, feeds)
                        except (GpuprofError, ValueError) as error:
                            observation = Observation(note=f"not measured: {error}")
                        yield source, observation

    def _row(self, run_id: str, source: OpSource, observation: Observation) -> OpRow:
        row = OpRow(
            run_id=run_id,
            model=PER_OP,
            device=self.device.name,
            batch=source.batch,
            position=0,
            name=f"{source.model}:{source.op.name}",
            sm_share_pct=self.share.sm_pct,
            mig_profile=self.share.mig,
            **op_facts(source.op),
            note=observation.note,
        )
        if not observation.times_ns:
            return row
        return replace(
            row,
            duration_mean_ns=round(fmean(observation.times_ns)),
            duration_p50_ns=round(median(observation.times_ns)),
            duration_min_ns=min(observation.times_ns),
            repeats=len(observation.times_ns),
        )

    def _variant(self, source: OpSource) -> dict[str, Any]:
        alone = ModelGraph(PER_OP, source.batch, (source.op,), (), (), source.op.weights, 0, "", "")
        return asdict(executed_variant(alone, self.device))

    def _new_pending_rows(self) -> _PendingRows:
        started = datetime.now(UTC)
        return _PendingRows(new_run_id(started), started)

    def _store_rows(self, pending: _PendingRows) -> None:
        if not pending.ops:
            return
        runtime, runtime_version = self.collector.runtime()
        run = RunRow(
            run_id=pending.run_id,
            started_at=pending.started_at,
            device=self.device.name,
            collector=self.collector.name,
            model=PER_OP,
            sm_share_pct=self.share.sm_pct,
            mig_profile=self.share.mig,
            processes=1,
            duration_s=time.monotonic() - pending.since,
            runtime=runtime,
            runtime_version=runtime_version,
            provider=self._backend.provider,
            collector_version=self.collector.version(),
            settings=json.dumps(self._backend.settings(), sort_keys=True),
            **machine_columns(),
        )
        self.database.append(Run(run, ops=pending.ops, kernels=pending.kernels))
        compact_if_due(self.database)

    def _read_known(self) -> dict[str, OpRow]:
        """Return the newest row of each op that these versions measured on this share, by signature."""
        runtime, runtime_version = self.collector.runtime()
        where = {
            "device": self.device.name,
            "model": PER_OP,
            "collector": self.collector.name,
            "collector_version": self.collector.version(),
            "runtime": runtime,
            "runtime_version": runtime_version,
            "mig_profile": self.share.mig,
        }
        runs = set(self.database.read_table("runs", ["run_id"], where).column("run_id").to_pylist())
        rows = read_records(self.database, OpRow, {"model": PER_OP, "device": self.device.name})
        same = [row for row in rows if row.run_id in runs and abs(row.sm_share_pct - self.share.sm_pct) < 1e-6]
        # Sorted by run id, which begins with the time: the newest row of an op wins.
        return {row.signature: row for row in sorted(same, key=lambda row: row.run_id)}
