"""Runs machine processes on the nodes of a Ray cluster: Ray places, supervises and replaces them.

Only orders to start a machine go through Ray. Machines and workers come to the router's rendezvous by TCP, and the
tensors travel on these connections.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpuprof.errors import GpuprofError, UnavailableError, install_hint
from gpuprof.runtime.module_command import module_command
from gpuprof.serving.engines.local_engine import Layouts, find_machine_parts
from gpuprof.serving.machine.machine import MachineOrder
from gpuprof.serving.machine.machine_link import MachineLink
from gpuprof.serving.machine.machine_parts import MachineParts
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.rendezvous import Rendezvous, RendezvousKey
from gpuprof.serving.transport.security import Security, check_exposure
from gpuprof.serving.watch.logs import LOGGER

if TYPE_CHECKING:
    from gpuprof.serving.server import EngineMaker
    from gpuprof.serving.server_settings import ServerSettings

_COME_S = 120.0
_END_S = 20.0
_RETRY_S = 5.0


def ray_engine(address: str | None, insecure: bool) -> EngineMaker:
    """Return the maker of the engine.

    Raises `UnavailableError` when Ray is not installed.

    Parameters
    ----------
    address : str or None
        Address of the cluster; None: the cluster of this machine.
    insecure : bool
        If True, the rendezvous may be open to other machines without TLS.
    """
    if importlib.util.find_spec("ray") is None:
        raise UnavailableError("ray is not installed", install_hint("ray"))

    def make(arena: Arena, settings: ServerSettings) -> RayEngine:
        return RayEngine(address or "", settings.security, settings.hang_s, insecure)

    return make


class RayEngine:
    """The engine of a Ray cluster.

    Parameters
    ----------
    address : str
        Address of the cluster; empty: the cluster of this machine.
    security : Security
        Its certificate also serves the rendezvous; machines and workers have a separate secret in place of the token.
    hang_s : float
        Silence after which a machine with a missing worker is reported.
    insecure : bool
        If True, the rendezvous may be open to other machines without TLS.
    """

    def __init__(self, address: str, security: Security, hang_s: float, insecure: bool) -> None:
        self._address = address
        self._security = security
        self._hang_s = hang_s
        self._insecure = insecure
        self._rendezvous = Rendezvous()
        self._machines: dict[str, MachineLink] = {}
        self._keeper: asyncio.subprocess.Process | None = None
        self._key: RendezvousKey | None = None
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._joined: asyncio.Future[str] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._rejoining: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._closing = False
        self.on_moved: Callable[[], None] = lambda: None

    async def parts(self, nodes: Mapping[str, Layouts]) -> dict[str, MachineParts]:
        """Return the parts of the machines of these nodes; a machine is placed at its first use.

        Raises `GpuprofError` when there is no cluster, it lacks the node, or the machine does not start.
        """
        machines = [await self.machine(node) for node in nodes]
        parts = {}
        for machine in machines:
            try:
                parts[machine.node] = await asyncio.wait_for(find_machine_parts(machine, nodes[machine.node]), _COME_S)
            except TimeoutError:
                raise UnavailableError(
                    f"Ray has not started the machine of node {machine.node!r} within {_COME_S:g} s",
                    "is its resource taken by another server? see ray status",
                ) from None
        return parts

    async def machine(self, node: str) -> MachineLink:
        """Return the machine of a node; Ray places it at its first use.

        Raises `GpuprofError` when there is no cluster, or it lacks the node.
        """
        async with self._opening:
            if node not in self._machines:
                await self._join()
                link = MachineLink(node, self._rendezvous)
                link.on_moved = self.on_moved
                try:
                    await self._request_machine(node)
                except GpuprofError:
                    link.close()
                    raise
                self._machines[node] = link
            return self._machines[node]

    def watch(self, now: float) -> None:
        """Report machines that are silent while a worker is missing."""
        for machine in self._machines.values():
            machine.watch(now, self._hang_s)

    async def close(self) -> None:
        """End the machines and their actors."""
        self._closing = True
        if self._rejoining is not None:
            self._rejoining.cancel()
        self._rendezvous.close()
        for machine in self._machines.values():
            machine.close()
        keeper = self._keeper
        if keeper is None or keeper.stdin is None:
            return
        keeper.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(keeper.wait(), _END_S)
        if keeper.returncode is None:
            keeper.kill()
            await keeper.wait()

    async def _join(self) -> None:
        """Join the cluster, once, and open the rendezvous where its nodes can reach it."""
        if self._key is not None:
            return
        host = await self._start_keeper()
        check_exposure(host, Security("internal", context=self._security.context), self._insecure)
        context, certificate = self._security.context, self._security.certificate
        try:
            self._key = await self._rendezvous.open_remote(host, context, certificate)
        except OSError as error:
            raise UnavailableError(f"cannot listen on {host} for machines: {error.strerror or error}") from None

    async def _start_keeper(self) -> str:
        """Start the keeper process, which talks to Ray; return this machine's address in the cluster."""
        future = self._joined = asyncio.get_running_loop().create_future()
        command = module_command("gpuprof.serving.engines.ray_keeper", self._address)
        pipe = asyncio.subprocess.PIPE
        self._keeper = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, preexec_fn=_ignore_interrupt
        )
        self._listening = asyncio.ensure_future(self._listen(self._keeper))
        return await asyncio.shield(future)  # the keeper says where no cluster answers

    async def _rejoin(self) -> None:
        """Join again after the keeper process has ended, and place its machines again."""
        while not self._closing:
            await asyncio.sleep(_RETRY_S)
            try:
                await self._start_keeper()
                for node in list(self._machines):
                    await self._request_machine(node)
            except GpuprofError as error:
                LOGGER.error("cannot join Ray again", extra={"error": str(error), "in_s": _RETRY_S})
            else:
                return

    async def _request_machine(self, node: str) -> None:
        assert self._keeper is not None and self._keeper.stdin is not None and self._key is not None
        answer = self._answers[node] = asyncio.get_running_loop().create_future()
        order = MachineOrder(node, self._key).to_json()
        self._keeper.stdin.write(json.dumps({"node": node, "order": order}).encode() + b"\n")
        await answer

    async def _listen(self, keeper: asyncio.subprocess.Process) -> None:
        """Handle the keeper's messages until it ends."""
        assert keeper.stdout is not None and self._joined is not None
        while line := await keeper.stdout.readline():
            try:
                self._receive(json.loads(line))
            except ValueError:  # a library's own words
                continue
        error = UnavailableError("the process that speaks with Ray has ended", "see ray status")
        futures: list[asyncio.Future[Any]] = [self._joined, *self._answers.values()]
        for waiting in futures:
            if not waiting.done():
                waiting.set_exception(error)
        if not self._closing and self._key is not None and (self._rejoining is None or self._rejoining.done()):
            LOGGER.error("lost touch with Ray, joins again")
            self._rejoining = asyncio.ensure_future(self._rejoin())

    def _receive(self, message: dict[str, Any]) -> None:
        assert self._joined is not None
        node = message.get("node")
        waiting: asyncio.Future[Any] | None = self._joined if node is None else self._answers.get(node)
        if "log" in message:
            LOGGER.warning(message["log"], extra={"machine": node})
        elif waiting is None or waiting.done():
            if "error" in message:
                LOGGER.error(message["error"], extra={"machine": node})
        elif "error" in message:
            waiting.set_exception(UnavailableError(message["error"], message["fix"]))
        else:
            waiting.set_result(message.get("host"))


def _ignore_interrupt() -> None:
    # Ctrl-C goes to the terminal's whole process group; the router drains first and then ends the keeper.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
