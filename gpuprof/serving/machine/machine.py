"""The machine: a process that starts, watches and restarts the workers of a node.

python -m gpuprof.serving.machine.machine < ORDER

The router starts it on its own machine; Ray starts it on others. It connects to the router's rendezvous, receives the
orders of its workers, and restarts workers that end. Tensors do not pass through it: workers connect to the
rendezvous themselves. When it is killed its workers live on, and its successor adopts them. When the router ends, the
machine ends its workers, restores the GPUs and ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpuprof.errors import GpuprofError
from gpuprof.machine.cgroup import remove_group
from gpuprof.machine.gpu_share import MigLayout, apply_layout, restore_layout
from gpuprof.machine.mps import MpsDaemon, adopt_daemon, mps_daemon
from gpuprof.runtime.module_command import REACTION_S, module_command
from gpuprof.serving.machine.orders import MachineParts, SharedMemory, WorkerOrder
from gpuprof.serving.transport.rendezvous import RendezvousKey, connect
from gpuprof.serving.transport.wire import Frame, FrameConnection, FrameKind
from gpuprof.serving.watch.supervised_process import LivingProcess, SupervisedProcess


@dataclass(frozen=True, slots=True)
class MachineOrder:
    """The order of a machine process at its start."""

    node: str  #: Name of the machine in the map.
    key: RendezvousKey
    memory: SharedMemory | None = None  #: Memory shared by workers and router; None: the router is on another machine.

    def to_json(self) -> str:
        """Return the order as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MachineOrder:
        """Return the order from the JSON of `to_json`."""
        fields = json.loads(text)
        memory = None if fields["memory"] is None else SharedMemory(**fields["memory"])
        return cls(fields["node"], RendezvousKey(**fields["key"]), memory)


@dataclass(slots=True)
class _Worker:
    orders: dict[str, WorkerOrder]  #: Of its models, by their numbers in the router.
    process: SupervisedProcess
    identity: list[int] | None = None  #: Process id and start time of a living process to adopt.


class GpuHolder:
    """Starts MPS daemons for GPUs and MIG instances that need them, applies MIG layouts, and undoes both on exit.

    ``changed``: called when `describe_takeover_state` returns something new.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._daemons: dict[str, MpsDaemon] = {}
        self._running = ExitStack()
        self._starts_one = asyncio.Lock()
        self._before: dict[int, MigLayout] = {}

    def describe_takeover_state(self) -> dict[str, Any]:
        """Return the state that a successor of this process needs: running daemons, and former MIG layouts."""
        daemons = {uuid: [daemon.pipe_directory, daemon.log_directory] for uuid, daemon in self._daemons.items()}
        return {"daemons": daemons, "mig": [[gpu, asdict(layout)] for gpu, layout in self._before.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over from a predecessor: its running daemons, and the MIG layouts to restore on exit."""
        for gpu, layout in state.get("mig", []):
            self._before[gpu] = MigLayout(
                layout["enabled"], tuple((name, start) for name, start in layout["instances"])
            )
        for uuid, (pipe, log) in state.get("daemons", {}).items():
            daemon = self._running.enter_context(adopt_daemon(uuid, pipe, log))
            if daemon is not None:
                self._daemons[uuid] = daemon

    async def bind(self, order: WorkerOrder) -> dict[str, str]:
        """Return the environment variables that limit a worker to its share of a GPU.

        Raises `UnavailableError` when the share needs MPS and MPS does not run here.
        """
        if order.gpu is None:
            return {}
        return order.gpu.environment(await self._find_daemon(order.gpu.uuid) if order.with_mps else None)

    async def apply_layouts(self, layouts: dict[str, list[list[Any]]]) -> None:
        """Apply MIG layouts; the former ones are restored on exit.

        Raises `UnavailableError` when the driver refuses. ``layouts``: by the number of the GPU.
        """
        for gpu, instances in layouts.items():
            layout = MigLayout.of([(profile, start) for profile, start in instances])
            before = await asyncio.to_thread(apply_layout, int(gpu), layout)
            if before is not None and int(gpu) not in self._before:
                self._before[int(gpu)] = before
                self._changed()

    async def close(self) -> None:
        """Stop the daemons, then restore the former MIG layouts."""
        # The daemons first: the driver refuses another layout while a process uses the GPU.
        await asyncio.to_thread(self._running.close)
        for gpu, layout in self._before.items():
            if (reason := await asyncio.to_thread(restore_layout, gpu, layout)) is not None:
                sys.stderr.write(f"gpuprof: GPU {gpu} could not be cut again as it was: {reason}\n")

    async def _find_daemon(self, uuid: str) -> MpsDaemon:
        """Return the MPS daemon of a GPU or MIG instance, started for the first worker that needs it."""
        async with self._starts_one:
            if uuid not in self._daemons:
                enter = self._running.enter_context
                self._daemons[uuid] = await asyncio.to_thread(enter, mps_daemon(uuid))
                self._changed()
            return self._daemons[uuid]


class MachineProcess:
    """Runs the workers that the router orders."""

    def __init__(self, order: MachineOrder) -> None:
        self._order = order
        self._workers: dict[str, _Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._welcome = False
        self._router_has_gone = asyncio.Event()
        self._connection = FrameConnection(self)
        self._gpus = GpuHolder(lambda: self._send(FrameKind.TAKEOVER_STATE, self._gpus.describe_takeover_state()))

    async def run(self) -> None:
        """Keep workers until the router has gone, then end them. Raises `OSError` when the router does not answer."""
        key = self._order.key
        await connect(key, self._connection)
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # also tells a boot from the next
        identity = {"pid": os.getpid(), "host": host, "parts": MachineParts.here().to_message()}
        self._send(FrameKind.HELLO, key.make_hello(f"machine:{self._order.node}", identity))
        await self._router_has_gone.wait()
        await asyncio.gather(*(self._stop_worker(number) for number in list(self._workers)))
        await self._gpus.close()
        if not self._welcome:
            raise ConnectionError("the router does not want this machine")

    def receive(self, frame: Frame) -> None:
        """Carry out a command of the router."""
        if frame.kind == FrameKind.ADD_WORKER:
            self._accept_worker(*frame.head)
        elif frame.kind == FrameKind.KILL:
            number, pid = frame.head
            if number in self._workers:
                self._workers[number].process.kill(pid)
        elif frame.kind == FrameKind.REMOVE_WORKER:
            self._start_task(self._stop_worker(frame.head))
        elif frame.kind == FrameKind.APPLY_LAYOUTS:
            self._start_task(self._apply_layouts(frame.head))
        elif frame.kind == FrameKind.WELCOME:
            self._welcome = True
            self._gpus.restore(frame.head or {})

    def on_close(self) -> None:
        """Called when the router has ended."""
        self._router_has_gone.set()

    async def _apply_layouts(self, layouts: dict[str, list[list[Any]]]) -> None:
        try:
            await self._gpus.apply_layouts(layouts)
        except GpuprofError as error:
            self._send(FrameKind.PARTS, {"error": error.message, "fix": error.fix})
        else:
            self._send(FrameKind.PARTS, MachineParts.here().to_message())

    def _accept_worker(self, number: str, order: dict[str, Any], identity: list[int] | None) -> None:
        worker_order = WorkerOrder.from_message(order)
        workers = (
            worker
            for worker in self._workers.values()
            if worker_order.turns and worker_order.turns in {peer.turns for peer in worker.orders.values()}
        )
        self._workers[number] = worker = next(workers, None) or self._make_worker()
        worker.orders[number] = worker_order
        worker.identity = worker.identity or identity
        if len(worker.orders) == worker_order.mates:
            worker.process.begin(None if worker.identity is None else LivingProcess.adopt(*worker.identity))

    def _make_worker(self) -> _Worker:
        orders: dict[str, WorkerOrder] = {}

        def report_end(pid: int) -> None:
            for number in orders:
                self._send(FrameKind.ENDED, [number, pid])

        def report_refusal(error: GpuprofError) -> None:
            for number in orders:
                self._send(FrameKind.REFUSED, [number, type(error).__name__, error.message, error.fix])

        return _Worker(orders, SupervisedProcess(partial(self._start, orders), report_end, report_refusal))

    async def _start(self, orders: Mapping[str, WorkerOrder]) -> LivingProcess:
        order = next(iter(orders.values()))
        environment = await self._gpus.bind(order)
        return await asyncio.to_thread(
            start_worker, list(orders), order, self._order.key, self._order.memory, environment
        )

    async def _stop_worker(self, number: str) -> None:
        worker = self._workers.pop(number, None)
        order = None if worker is None else worker.orders.pop(number)
        if worker is not None and order is not None and not worker.orders:  # else its other models go on
            await worker.process.stop(REACTION_S)
            orders = (order for peer in self._workers.values() for order in peer.orders.values())
            if order.quota_cores is not None and all(peer.group != order.group for peer in orders):
                remove_group(order.group)
        self._send(FrameKind.WORKER_REMOVED, number)

    def _send(self, kind: FrameKind, head: object) -> None:
        self._connection.send(kind, head)

    def _start_task(self, task: Coroutine[Any, Any, None]) -> None:
        future = asyncio.ensure_future(task)
        # The loop holds only weak references: an unreferenced task may be collected while it waits (asyncio,
        # create_task).
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)


def start_worker(
    numbers: Sequence[str],
    order: WorkerOrder,
    key: RendezvousKey,
    memory: SharedMemory | None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> LivingProcess:
    """Start a worker. Raises `OSError` when no process can be started.

    Parameters
    ----------
    numbers : sequence of str
        The numbers of the worker's models in the router.
    order : WorkerOrder
        The order of any of the models, which all have the worker's share.
    key : RendezvousKey
        Address and secret of the router's rendezvous.
    memory : SharedMemory or None
        Memory shared with the router; None: tensors travel with the messages.
    environment : mapping of str to str
        Variables that bind the process to its share of a GPU.
    """
    arena = SharedMemory(-1, 0) if memory is None else memory
    command = module_command("gpuprof.serving.worker.worker", str(arena.fd), str(arena.size), *numbers)
    # NumPy's own threads would come on top of ONNX Runtime's.
    threads = {"OMP_NUM_THREADS": str(order.threads), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    descriptors = () if memory is None else (memory.fd,)
    return LivingProcess.start(command, key.to_json(), descriptors, {**os.environ, **threads, **environment})


def main() -> int:
    """Keep workers until the router has gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the router drains first, and then closes the connection
        signal.signal(number, signal.SIG_IGN)
    try:
        asyncio.run(MachineProcess(MachineOrder.from_json(sys.stdin.read())).run())
    except OSError:  # the router has gone meanwhile; if not, it will notice
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
