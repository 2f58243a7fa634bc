"""Spreads a profiling sweep over the GPUs of a Ray cluster or, without GPUs, over its machines.

Each worker measures a model at a batch size at a time, with ``gpuprof profile`` into its own database, seeded with the
earlier measurements. New rows are returned as tables and appended by the driver run by run: completely or not at all,
as if measured here. Workers of different device kinds measure the whole sweep each.
"""

from __future__ import annotations

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

from gpuprof.errors import GpuprofError, InputError, UnavailableError, UnstableError
from gpuprof.kernel_db.schema import TABLES, ColocationRow, ModelRow, from_arrow
from gpuprof.kernel_db.store import KernelDb, write_segment
from gpuprof.machine.ray_cluster import join_cluster
from gpuprof.runtime.module_command import module_command

#: Tables with earlier measurements and the devices' ceilings.
SEED_TABLES = ("runs", "devices", "models", "colocations")
#: Run id of the seed, which sorts before all others.
_SEED = "00000000-000000-000000-before"
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """Unit of work of a worker."""

    name: str  #: Display name.
    arguments: tuple[str, ...]  #: Arguments of ``gpuprof profile``, without the database.
    directory: str  #: Working directory of the arguments, base of relative paths.


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task: the tables of each run by name, and the error output if it failed."""

    runs: Mapping[str, Mapping[str, pa.Table]]
    exit_code: int = 0
    said: str = ""


class SweepWorker:
    """A GPU or a machine of the cluster; an actor."""

    def device(self, kind: str | None) -> str:
        """Return the name of the local device; empty if it is not the wanted device."""
        from gpuprof.machine.cpu import local_cpu
        from gpuprof.machine.gpu import local_gpus

        gpus = [] if kind == "cpu" else [gpu.name for gpu in local_gpus()]
        if kind in (None, "gpu", "cpu"):
            names = gpus[:1] if gpus or kind == "gpu" else [local_cpu().name]
        else:
            names = [name for name in (local_cpu().name, *gpus) if name == kind]
        return names[0] if names else ""

    def measure(self, task: Task, device: str, seed: Mapping[str, pa.Table]) -> TaskResult:
        """Run a task and return the tables added to ``seed``."""
        with tempfile.TemporaryDirectory(prefix="gpuprof-sweep-") as directory:
            database = Path(directory) / "db"
            database.mkdir()
            write_segment(database, _SEED, seed)
            # The command, not the library: a model that crashes or exhausts memory must not end the actor.
            command = module_command("gpuprof", "profile", *task.arguments, "--device", device)
            child = subprocess.run(
                [*command, "--db", str(database), "--json"],
                cwd=task.directory if Path(task.directory).is_dir() else None,
                capture_output=True,
                text=True,
                check=False,
            )
            last = next((line for line in reversed(child.stderr.splitlines()) if line.startswith("gpuprof: ")), "")
            ids = set(seed["runs"]["run_id"].to_pylist())
            return TaskResult(_added_tables(KernelDb(database), ids), child.returncode, last.removeprefix("gpuprof: "))


def _added_tables(database: KernelDb, run_ids: set[str]) -> dict[str, dict[str, pa.Table]]:
    runs: dict[str, dict[str, pa.Table]] = {}
    for name in TABLES:
        table = database.read_table(name)
        for run in sorted(set(table["run_id"].to_pylist()) - run_ids):
            runs.setdefault(run, {})[name] = table.filter(pc.equal(table["run_id"], run))
    return runs


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
    """Measures tasks on a Ray cluster into a database.

    ``address``: address of the cluster; empty: this machine's cluster. Raises `UnavailableError` when Ray is not
    installed or no cluster responds.
    """

    def __init__(self, database: KernelDb, address: str = "") -> None:
        self._database = database
        self._ray = join_cluster(address)

    def run(
        self, tasks: Sequence[Task], device: str | None, tell: Callable[[str], None]
    ) -> Iterator[ModelRow | ColocationRow]:
        """Measure the tasks; yield the rows of ``models`` and ``colocations`` once they are stored in the database.

        Raises `UnavailableError` when the cluster has no such device; the `GpuprofError` of the first failed task,
        after all other tasks have ended. ``device``: ``"cpu"``, ``"gpu"``, the name of a device, or None: each worker's
        first GPU, else its CPU; ``tell``: called with progress messages.
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
            (reference,), _ = self._ray.wait(list(running), num_returns=1)
            ended = running.pop(reference)
            try:
                measured = self._ray.get(reference)
            except self._ray.exceptions.RayActorError:
                failures += self._measure_elsewhere(ended, [task.group for task in running.values()], tell)
                continue
            ended.group.idle.append(ended.place)
            yield from self._store(measured)
            if measured.exit_code not in (0, UnstableError.exit_code):
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
        if ended.attempt < _ATTEMPTS and (group.idle or any(busy_group is group for busy_group in busy)):
            tell(f"a place with {group.device} has gone: {task.name} is measured elsewhere")
            group.waiting.append((task, ended.attempt + 1))
            return []
        tasks = [task, *(task for task, _ in group.waiting)] if not group.idle and group not in busy else [task]
        group.waiting = group.waiting if tasks == [task] else []
        return [UnavailableError(f"{task.name}: its place in the cluster has gone", "see ray status") for task in tasks]

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
        """Yield an actor for each GPU of a node, or an actor with all its CPUs, to keep other work away meanwhile."""
        strategies = import_module("ray.util.scheduling_strategies")
        here = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        resources = node["Resources"]
        count = int(resources.get("GPU", 0)) if with_gpus else min(1, int(resources.get("CPU", 0)))
        share = {"num_gpus": 1, "num_cpus": 0} if with_gpus else {"num_cpus": int(resources.get("CPU", 0))}
        for _ in range(count):
            yield self._ray.remote(scheduling_strategy=here, **share)(SweepWorker).remote()

    def _seed_tables(self) -> dict[str, pa.Table]:
        return {name: self._database.read_table(name) for name in SEED_TABLES}

    def _store(self, measured: TaskResult) -> Iterator[ModelRow | ColocationRow]:
        run_ids = set(self._database.read_table("runs", ["run_id"])["run_id"].to_pylist())
        for run, tables in measured.runs.items():
            # Seeds may differ: another worker may already have returned the same run.
            if run in run_ids:
                continue
            self._database.append_tables(run, tables)
            for name in ("models", "colocations"):
                if name in tables:
                    yield from cast("list[ModelRow | ColocationRow]", from_arrow(name, tables[name]))


def task_of(model: str, path: Path, batch: int, options: Sequence[str]) -> Task:
    """Return the task of a model at a batch size.

    ``model`` and ``path``: the file must exist under the same path on every machine of the cluster; ``options``:
    further arguments of ``gpuprof profile``.
    """
    model_argument = f"{model}={path.absolute()}"
    return Task(f"{model} at batch {batch}", (model_argument, "--batch", str(batch), *options), os.getcwd())  # noqa: PTH109
