"""Measures each distinct op of many models once, as a model of its own, and remembers it.

This is USHER's way of profiling (section 4.1: operators, not models). An op by itself finds its weights in the
cache more often than within its model, and is fused with nothing: its time is the op's, not the model's share.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gpuprof.device import Device
from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.kernel_db.compaction import tidy
from gpuprof.kernel_db.schema import PER_OP, KernelRow, OpRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
from gpuprof.profiling.campaign import machine
from gpuprof.profiling.children import Child
from gpuprof.profiling.collector import Collector
from gpuprof.profiling.measurement import CPU_PROVIDER, save_arrays, shared_group, slices_of
from gpuprof.profiling.op_model import OpSource, distinct_ops, write_op_model
from gpuprof.profiling.op_rows import op_facts
from gpuprof.profiling.ort_trace import NodeEvent, read_trace
from gpuprof.profiling.planning import NamedModel
from gpuprof.session import session_settings
from gpuprof.share import Share

_EFFORT = {"time_s": 0.15, "min_repeats": 7, "max_repeats": 200}
_SKIPPED_REPEATS = 2
_LOAD_S = 300.0
_KEEP_EVERY_S = 3.0
#: Nodes that change the layout for a lone op; within a model they are rare.
_LAYOUT = {"ReorderInput", "ReorderOutput"}


@dataclass(frozen=True, slots=True)
class OpOutcome:
    """What the database holds of an op now."""

    row: Mapping[str, Any]
    measured_now: bool


@dataclass(slots=True)
class _Harvest:
    """Rows that are not on the disk yet."""

    run_id: str
    started_at: datetime
    since: float = field(default_factory=time.monotonic)
    ops: list[OpRow] = field(default_factory=list)
    kernels: list[KernelRow] = field(default_factory=list)


class PerOp:
    """Measures ops on one device under one share into one database.

    Parameters
    ----------
    database : KernelDb
    device : Device
    collector : Collector
        Names the versions under which ops are remembered.
    share : Share
    force : bool
        Measure what is there already, too.
    """

    def __init__(
        self, database: KernelDb, device: Device, collector: Collector, share: Share, force: bool = False
    ) -> None:
        self.database = database
        self.device = device
        self.collector = collector
        self.share = share
        self.force = force

    def pending(self, models: Iterable[NamedModel], batches: Sequence[int]) -> tuple[list[OpSource], list[OpOutcome]]:
        """Return the distinct ops that are to be measured, and what is known of the others."""
        wanted: dict[str, OpSource] = {}
        for model in models:
            for batch in batches:
                wanted = {**distinct_ops(model.path, batch, model.name), **wanted}
        known = {} if self.force else self._known()
        missing = [source for signature, source in wanted.items() if signature not in known]
        return missing, [OpOutcome(known[signature], False) for signature in wanted if signature in known]

    def run(self, sources: Sequence[OpSource]) -> Iterator[OpOutcome]:
        """Measure ``sources`` and yield each; every few seconds what was measured is put on the disk.

        An op that cannot run alone, or that takes the child process with it, is remembered with the reason.

        Raises
        ------
        UnavailableError
            When the share cannot be enforced here.
        """
        harvest = self._fresh()
        try:
            for source, reply, trace in self._measure(sources):
                row, kernels = self._rows(harvest.run_id, source, reply, trace)
                harvest.ops.append(row)
                harvest.kernels += kernels
                yield OpOutcome(asdict(row), True)
                if time.monotonic() - harvest.since > _KEEP_EVERY_S:
                    self._keep(harvest)
                    harvest = self._fresh()
        finally:
            self._keep(harvest)

    def _measure(
        self, sources: Sequence[OpSource]
    ) -> Iterator[tuple[OpSource, Mapping[str, object], tuple[NodeEvent, ...]]]:
        with tempfile.TemporaryDirectory(prefix="gpuprof-") as name, shared_group("ops") as group:
            left = list(sources)
            while left:
                with ExitStack() as stack:
                    child = self._child(stack, group)
                    while left:
                        source = left.pop(0)
                        reply, alive = self._ask(child, source, Path(name))
                        yield source, reply, _events(reply)
                        if not alive:
                            break

    def _child(self, stack: ExitStack, group: str) -> Child:
        part = slices_of([self.share])[0]
        task = {
            "kind": "ops",
            "threads": part.threads,
            "provider": CPU_PROVIDER,
            "slice": asdict(part),
            "group": group,
            **_EFFORT,
        }
        child = stack.enter_context(Child(task, "ops"))
        child.expect("ready", _LOAD_S)
        return child

    def _ask(self, child: Child, source: OpSource, directory: Path) -> tuple[Mapping[str, object], bool]:
        """Return the child's answer, and whether it is alive."""
        model, inputs = directory / "op.onnx", directory / "op.npz"
        try:
            save_arrays(write_op_model(source, model), inputs)
        except (GpuprofError, ValueError) as error:
            return {"error": str(error)}, True
        child.tell(json.dumps({"model": str(model), "inputs": str(inputs)}))
        try:
            return child.expect("op", _LOAD_S), True
        except UnavailableError as error:
            return {"error": str(error)}, False

    def _rows(
        self, run_id: str, source: OpSource, reply: Mapping[str, object], trace: tuple[NodeEvent, ...]
    ) -> tuple[OpRow, list[KernelRow]]:
        op = source.op
        sums = _sums(trace)
        row = OpRow(
            run_id=run_id,
            model=PER_OP,
            device=self.device.name,
            batch=source.batch,
            position=0,
            name=f"{source.model}:{op.name}",
            sm_share_pct=self.share.sm_pct,
            mig_profile=self.share.mig,
            **op_facts(op),
            note=_note(reply, trace),
        )
        if sums:
            row = replace(
                row,
                duration_mean_ns=round(fmean(sums)),
                duration_p50_ns=round(median(sums)),
                duration_min_ns=min(sums),
                repeats=len(sums),
            )
        return row, [self._kernel(run_id, source, event, n) for n, event in enumerate(_last_repeat(trace))]

    def _kernel(self, run_id: str, source: OpSource, event: NodeEvent, position: int) -> KernelRow:
        return KernelRow(
            run_id=run_id,
            model=PER_OP,
            device=self.device.name,
            batch=source.batch,
            name=f"{event.provider.removesuffix('ExecutionProvider')}:{event.op_type}",
            position=position,
            sm_share_pct=self.share.sm_pct,
            mig_profile=self.share.mig,
            op_signature=source.op.signature,
            op_type=source.op.op_type,
            op_name=f"{source.model}:{source.op.name}",
            duration_ns=event.duration_ns,
        )

    def _fresh(self) -> _Harvest:
        started = datetime.now(UTC)
        return _Harvest(new_run_id(started), started)

    def _keep(self, harvest: _Harvest) -> None:
        if not harvest.ops:
            return
        runtime, runtime_version = self.collector.runtime()
        threads = slices_of([self.share])[0].threads
        run = RunRow(
            run_id=harvest.run_id,
            started_at=harvest.started_at,
            device=self.device.name,
            collector=self.collector.name,
            model=PER_OP,
            sm_share_pct=self.share.sm_pct,
            mig_profile=self.share.mig,
            processes=1,
            duration_s=time.monotonic() - harvest.since,
            runtime=runtime,
            runtime_version=runtime_version,
            provider=CPU_PROVIDER,
            collector_version=self.collector.version(),
            settings=json.dumps({**session_settings(threads), "effort": _EFFORT}, sort_keys=True),
            **machine(),
        )
        self.database.append(Run(run, ops=harvest.ops, kernels=harvest.kernels))
        tidy(self.database)

    def _known(self) -> dict[str, Mapping[str, Any]]:
        """Return the newest row of each op that these versions measured on this share, by signature."""
        runtime, runtime_version = self.collector.runtime()
        wanted = {
            "device": self.device.name,
            "model": PER_OP,
            "collector": self.collector.name,
            "collector_version": self.collector.version(),
            "runtime": runtime,
            "runtime_version": runtime_version,
            "mig_profile": self.share.mig,
        }
        runs = set(self.database.read("runs", ["run_id"], wanted).column("run_id").to_pylist())
        rows = self.database.read("ops", where={"model": PER_OP, "device": self.device.name}).to_pylist()
        same = [row for row in rows if row["run_id"] in runs and abs(row["sm_share_pct"] - self.share.sm_pct) < 1e-6]
        return {row["signature"]: row for row in sorted(same, key=lambda row: str(row["run_id"]))}


def _events(reply: Mapping[str, object]) -> tuple[NodeEvent, ...]:
    profile = reply.get("profile")
    if not isinstance(profile, str):
        return ()
    try:
        return read_trace(Path(profile))
    except InputError:  # a whole profile without a node: the runtime has dropped the op
        return ()
    finally:
        Path(profile).unlink(missing_ok=True)


def _sums(trace: Sequence[NodeEvent]) -> list[int]:
    """Return the op's time in each run of its model, warm-up left out."""
    times: dict[int, int] = {}
    for event in trace:
        if event.op_type not in _LAYOUT:
            times[event.repeat] = times.get(event.repeat, 0) + event.duration_ns
    kept = sorted(times)[_SKIPPED_REPEATS:] or sorted(times)
    return [times[repeat] for repeat in kept]


def _last_repeat(trace: Sequence[NodeEvent]) -> list[NodeEvent]:
    last = max((event.repeat for event in trace), default=0)
    return [event for event in trace if event.repeat == last]


def _note(reply: Mapping[str, object], trace: Sequence[NodeEvent]) -> str | None:
    if error := reply.get("error"):
        return f"not measured: {error}"
    if not trace:
        return "not executed: the runtime drops it"
    layout = sum(event.duration_ns for event in _last_repeat(trace) if event.op_type in _LAYOUT)
    return f"changes of layout, {layout} ns, left out" if layout else None
