"""Spreads a profiling sweep over the GPUs, or where it has none the machines, of a Ray cluster.

Each place measures one model at one batch size at a time, with ``gpuprof profile`` into a database of its own that
begins with what was measured before. What it adds comes back as tables, and the driver appends it run by run: whole or
not at all, as if it had been measured here. Places of different kinds of devices measure the whole sweep each.
"""

from __future__ import annotations

import io
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.kernel_db.schema import TABLES, ColocationRow, ModelRow, from_arrow
from gpuprof.kernel_db.segment import write_segment
from gpuprof.kernel_db.store import KernelDb
from gpuprof.machine.ray_cluster import join_cluster
from gpuprof.runtime.module_command import module_command

#: Tables that say what has been measured already, and what the devices can do.
SEED_TABLES = ("runs", "devices", "models", "colocations")
#: The run id under which the seed is written: it sorts before all others.
_SEED = "00000000-000000-000000-before"
_ATTEMPTS = 3
_UNSTABLE = 2  # exit code: the rows are there, marked


@dataclass(frozen=True, slots=True)
class Task:
    """The unit of work of one worker."""

    name: str  #: For people.
    arguments: tuple[str, ...]  #: Of ``gpuprof profile``, but for the database.
    directory: str  #: Where they were given; paths count from here.


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task: the tables of each run as Arrow files, and the error output if it failed."""

    runs: Mapping[str, Mapping[str, bytes]]  #: Mapping of str to mapping of str to bytes. Run, table, content.
    exit_code: int = 0
    said: str = ""


class SweepWorker:
    """A GPU or a machine of the cluster; an actor."""

    def device(self, wanted: str | None) -> str:
        """Return the name of the device here; an empty one where it is not the one that is wanted."""
        from gpuprof.machine.cpu import local_cpu
        from gpuprof.machine.gpu import local_gpus

        gpus = [] if wanted == "cpu" else [gpu.name for gpu in local_gpus()]
        if wanted in (None, "gpu", "cpu"):
            names = gpus[:1] if gpus or wanted == "gpu" else [local_cpu().name]
        else:
            names = [name for name in (local_cpu().name, *gpus) if name == wanted]
        return names[0] if names else ""

    def measure(self, task: Task, device: str, seed: Mapping[str, bytes]) -> TaskResult:
        """Run a task and return what it added to ``seed``."""
        with tempfile.TemporaryDirectory(prefix="gpuprof-sweep-") as directory:
            database = Path(directory) / "db"
            database.mkdir()
            before = {name: read_table(content) for name, content in seed.items()}
            write_segment(database, _SEED, before)
            # The command and not the library: a model that crashes or eats the memory must not take the actor with it.
            command = module_command("gpuprof", "profile", *task.arguments, "--device", device)
            done = subprocess.run(
                [*command, "--db", str(database), "--json"],
                cwd=task.directory if Path(task.directory).is_dir() else None,
                capture_output=True,
                text=True,
                check=False,
            )
            last = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("gpuprof: ")), "")
            known = set(before["runs"]["run_id"].to_pylist())
            return TaskResult(_added_tables(KernelDb(database), known), done.returncode, last.removeprefix("gpuprof: "))


def _added_tables(database: KernelDb, known: set[str]) -> dict[str, dict[str, bytes]]:
    runs: dict[str, dict[str, bytes]] = {}
    for name in TABLES:
        table = database.read_table(name)
        for run in sorted(set(table["run_id"].to_pylist()) - known):
            rows = table.filter(pc.equal(table["run_id"], run))
            runs.setdefault(run, {})[name] = table_bytes(rows)
    return runs


def table_bytes(table: pa.Table) -> bytes:
    """Return a table as an Arrow file."""
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def read_table(content: bytes) -> pa.Table:
    """Return the table that `table_bytes` wrote."""
    with pa.ipc.open_file(io.BytesIO(content)) as reader:
        return reader.read_all()


@dataclass(slots=True, eq=False)
class _WorkerGroup:
    """Workers with the same device, and their remaining tasks."""

    device: str
    idle: list[Any]
    waiting: list[tuple[Task, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _RunningTask:
    group: _WorkerGroup
    place: Any
    task: Task
    attempt: int


class RaySweep:
    """Measures tasks on a Ray cluster into one database.

    ``address``: of the cluster; empty: the one of this machine. Raises `UnavailableError` when Ray is not installed or
    no cluster answers.
    """

    def __init__(self, database: KernelDb, address: str = "") -> None:
        self._database = database
        self._ray = join_cluster(address)

    def run(
        self, tasks: Sequence[Task], device: str | None, tell: Callable[[str], None]
    ) -> Iterator[ModelRow | ColocationRow]:
        """Measure and yield the rows of ``models`` and ``colocations`` as they come into the database.

        Raises `UnavailableError` when the cluster has no such device; `GpuprofError`: what the first task that failed
        said, after the others. ``device``: ``"cpu"``, ``"gpu"``, the name of a device, or None: each place's best;
        ``tell``: told what happens.
        """
        groups = self._group_workers(device)
        tell("; ".join(f"{len(group.idle)} × {group.device}" for group in groups))
        for group in groups:
            group.waiting = [(task, 1) for task in tasks]
        failures: list[GpuprofError] = []
        running: dict[Any, _RunningTask] = {}
        while True:
            for group in groups:
                self._start_idle_workers(group, running)
            if not running:
                break
            (done,), _ = self._ray.wait(list(running), num_returns=1)
            ended = running.pop(done)
            try:
                measured = self._ray.get(done)
            except self._ray.exceptions.RayActorError:
                failures += self._measure_elsewhere(ended, [other.group for other in running.values()], tell)
                continue
            ended.group.idle.append(ended.place)
            yield from self._store(measured)
            if measured.exit_code not in (0, _UNSTABLE):
                kind = InputError if measured.exit_code == InputError.exit_code else UnavailableError
                failures.append(kind(f"{ended.task.name} on {ended.group.device}: {measured.said}"))
        if failures:
            raise failures[0]

    def _start_idle_workers(self, group: _WorkerGroup, running: dict[Any, _RunningTask]) -> None:
        while group.idle and group.waiting:
            place, (task, attempt) = group.idle.pop(), group.waiting.pop(0)
            measuring = place.measure.remote(task, group.device, self._seed_tables())
            running[measuring] = _RunningTask(group, place, task, attempt)

    def _measure_elsewhere(
        self, ended: _RunningTask, busy: Sequence[_WorkerGroup], tell: Callable[[str], None]
    ) -> list[GpuprofError]:
        """Reassign a task whose worker died; return the failure if that is impossible."""
        group, task = ended.group, ended.task
        if ended.attempt < _ATTEMPTS and (group.idle or any(other is group for other in busy)):
            tell(f"a place with {group.device} has gone: {task.name} is measured elsewhere")
            group.waiting.append((task, ended.attempt + 1))
            return []
        lost = [task, *(task for task, _ in group.waiting)] if not group.idle and group not in busy else [task]
        group.waiting = group.waiting if lost == [task] else []
        return [UnavailableError(f"{task.name}: its place in the cluster has gone", "see ray status") for task in lost]

    def close(self) -> None:
        """Leave the cluster; its places end."""
        self._ray.shutdown()

    def _group_workers(self, device: str | None) -> list[_WorkerGroup]:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        with_gpus = device != "cpu" and any(node["Resources"].get("GPU") for node in nodes)
        places = [place for node in nodes for place in self._start_workers(node, with_gpus)]
        names = self._ray.get([place.device.remote(device) for place in places])
        groups: dict[str, _WorkerGroup] = {}
        for place, name in zip(places, names, strict=True):
            if name:
                groups.setdefault(name, _WorkerGroup(name, [])).idle.append(place)
        if not groups:
            raise UnavailableError(f"the Ray cluster has no {device or 'place with a CPU or a GPU'}", "see ray status")
        return list(groups.values())

    def _start_workers(self, node: Mapping[str, Any], with_gpus: bool) -> Iterator[Any]:
        """Yield an actor for each GPU of a node, or one that has all its CPUs: nothing else is to run meanwhile."""
        strategies = import_module("ray.util.scheduling_strategies")
        here = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        resources = node["Resources"]
        count = int(resources.get("GPU", 0)) if with_gpus else min(1, int(resources.get("CPU", 0)))
        share = {"num_gpus": 1, "num_cpus": 0} if with_gpus else {"num_cpus": int(resources.get("CPU", 0))}
        for _ in range(count):
            yield self._ray.remote(scheduling_strategy=here, **share)(SweepWorker).remote()

    def _seed_tables(self) -> dict[str, bytes]:
        return {name: table_bytes(self._database.read_table(name)) for name in SEED_TABLES}

    def _store(self, measured: TaskResult) -> Iterator[ModelRow | ColocationRow]:
        known = set(self._database.read_table("runs", ["run_id"])["run_id"].to_pylist())
        for run, tables in measured.runs.items():
            # Seeds may differ: another place can have brought the same run meanwhile.
            if run in known:
                continue
            rows = {name: read_table(content) for name, content in tables.items()}
            self._database.append_tables(run, rows)
            for name in ("models", "colocations"):
                if name in rows:
                    yield from cast("list[ModelRow | ColocationRow]", from_arrow(name, rows[name]))


def task_of(model: str, path: Path, batch: int, options: Sequence[str]) -> Task:
    """Return the task of one model at one batch size.

    ``model`` and ``path``: the file must be there under the same path on every machine of the cluster; ``options``:
    further arguments of ``gpuprof profile``.
    """
    named = f"{model}={path.absolute()}"
    return Task(f"{model} at batch {batch}", (named, "--batch", str(batch), *options), os.getcwd())  # noqa: PTH109
