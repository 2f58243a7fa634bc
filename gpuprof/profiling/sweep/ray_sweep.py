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
from dataclasses import dataclass
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


def sweep_cluster(
    database: KernelDb, tasks: Sequence[Task], device: str | None, tell: Callable[[str], None]
) -> Iterator[ModelRow | ColocationRow]:
    """Measure tasks on a Ray cluster; yield rows of ``models`` and ``colocations`` once they are in the database.

    The cluster is that of ``RAY_ADDRESS``, or of this machine. Raises `UnavailableError` when Ray is not installed, no
    cluster responds, or it has no such device; the `GpuprofError` of the first failed task, after all other tasks have
    ended. ``device``: ``"cpu"``, ``"gpu"``, the name of a device, or None: each worker's first GPU, else its CPU;
    ``tell``: called with progress messages.
    """
    ray = join_cluster()
    try:
        idle = _start_workers(ray, device)
        tell("; ".join(f"{len(workers)} × {name}" for name, workers in idle.items()))
        waiting = {name: list(tasks) for name in idle}
        running: dict[Any, tuple[str, Any, Task]] = {}
        failures: list[GpuprofError] = []
        while True:
            for name, workers in idle.items():
                while workers and waiting[name]:
                    worker, task = workers.pop(), waiting[name].pop(0)
                    seed = {table: database.read_table(table) for table in SEED_TABLES}
                    running[worker.measure.remote(task, name, seed)] = (name, worker, task)
            if not running:
                break
            (reference,), _ = ray.wait(list(running), num_returns=1)
            name, worker, task = running.pop(reference)
            try:
                measured: TaskResult = ray.get(reference)
            except ray.exceptions.RayActorError:
                fix = "see ray status; the same command measures what is missing"
                failures.append(UnavailableError(f"{task.name}: its place in the cluster has gone", fix))
                continue
            idle[name].append(worker)
            yield from _store(database, measured)
            if measured.exit_code not in (0, UnstableError.exit_code):
                kind = InputError if measured.exit_code == InputError.exit_code else UnavailableError
                failures.append(kind(f"{task.name} on {name}: {measured.said}"))
        if failures:
            raise failures[0]
    finally:
        ray.shutdown()


def _start_workers(ray: Any, device: str | None) -> dict[str, list[Any]]:
    """Return the actors by device: one for each GPU of the cluster, or one for each node with all its CPUs."""
    strategies = import_module("ray.util.scheduling_strategies")
    nodes = [node for node in ray.nodes() if node["Alive"]]
    with_gpus = device != "cpu" and any(node["Resources"].get("GPU") for node in nodes)
    workers = []
    for node in nodes:
        resources = node["Resources"]
        count = int(resources.get("GPU", 0)) if with_gpus else min(1, int(resources.get("CPU", 0)))
        # All CPUs of a node, to keep other work away meanwhile.
        share = {"num_gpus": 1, "num_cpus": 0} if with_gpus else {"num_cpus": int(resources.get("CPU", 0))}
        here = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        workers += [ray.remote(scheduling_strategy=here, **share)(SweepWorker).remote() for _ in range(count)]
    by_device: dict[str, list[Any]] = {}
    for worker, name in zip(workers, ray.get([worker.device.remote(device) for worker in workers]), strict=True):
        if name:
            by_device.setdefault(name, []).append(worker)
    if not by_device:
        raise UnavailableError(f"the Ray cluster has no {device or 'place with a CPU or a GPU'}", "see ray status")
    return by_device


def _store(database: KernelDb, measured: TaskResult) -> Iterator[ModelRow | ColocationRow]:
    run_ids = set(database.read_table("runs", ["run_id"])["run_id"].to_pylist())
    for run, tables in measured.runs.items():
        # Seeds may differ: another worker may already have returned the same run.
        if run in run_ids:
            continue
        database.append_tables(run, tables)
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
