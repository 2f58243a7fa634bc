"""Watches connections of gRPC in a thread of its own, every few milliseconds: see `hpack_bombs`.

A connection begins with room for about a kilobyte, which the system widens by itself as more comes and is read. Where
more comes than a head of ordinary size, that is stopped until a call for inference is admitted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gpuprof.machine.scheduling import shorten_wakeup_latency
from gpuprof.serving.protocol.connection_files import ConnectionFiles
from gpuprof.serving.protocol.grpc_connection_bytes import ConnectionBytes, Peer
from gpuprof.serving.protocol.hpack_bombs import ORDINARY_BYTES, HpackBombDetector

#: While clients are there that were not admitted, and while there are none.
_NAP_S, _IDLE_NAP_S = 0.005, 0.01
#: Of the time, so much at most goes into looking.
_LOOK_PART = 0.5
#: After the last one was shut out in a flood, nobody connects for so long.
_PAUSE_S = 0.5


class ConnectionGuard:
    """Shuts out who makes grpcio keep far more than was sent.

    Parameters
    ----------
    port : int
    connection_bytes : ConnectionBytes
        Knows who was admitted, and which bytes were messages.
    measure_memory : callable
        Returns the memory of the process beyond that at rest, and what of it was charged, in bytes.
    note_shut_out : callable
        Told, in the guard's thread, who was shut out.
    """

    def __init__(
        self,
        port: int,
        connection_bytes: ConnectionBytes,
        measure_memory: Callable[[], tuple[int, int]],
        note_shut_out: Callable[[list[Peer]], object],
    ) -> None:
        self._bytes = connection_bytes
        self._measure_memory = measure_memory
        self._note_shut_out = note_shut_out
        self._files = ConnectionFiles(port)
        self._detector = HpackBombDetector()
        self._widened: set[Peer] = set()
        self._held: set[Peer] = set()
        self._paused_until = 0.0
        self._woken = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="gRPC guard", daemon=True)

    def start(self) -> None:
        """Begin; the server must listen by now."""
        self._files.narrow()
        self._bytes.tell_of_admitted(self._woken.set)
        self._thread.start()

    def end(self) -> None:
        """Stop looking, and wait until that is so."""
        self._ended = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        shorten_wakeup_latency()
        looked = time.monotonic()
        while not self._ended:
            began = time.monotonic()
            count = self._look(began - looked)
            looked, took = began, time.monotonic() - began
            self._woken.wait(max(_NAP_S if count else _IDLE_NAP_S, took * (1.0 / _LOOK_PART - 1.0)))

    def _look(self, elapsed_s: float) -> int:
        """Look once; return how many clients were not admitted yet."""
        self._woken.clear()
        admitted, explained = self._bytes.list_admitted(), self._bytes.explain()
        received = self._files.look()
        self._widened = {peer for peer in self._widened if peer in received}
        self._widened |= {peer for peer in admitted - self._widened if self._files.widen(peer)}
        held = {peer for peer in self._held if peer in received}
        more = received.keys() - admitted - held
        self._held = held | {peer for peer in more if received[peer] > ORDINARY_BYTES and self._files.hold(peer)}
        self._detector.note(received, explained, elapsed_s)
        excess = self._detector.find_excess(admitted, *self._measure_memory())
        self._pause(bool(excess), time.monotonic())
        shut_out = [peer for peer in excess if self._files.shut_down(peer)]
        if shut_out:
            self._note_shut_out(shut_out)
        return len(received.keys() - admitted)

    def _pause(self, is_attacked: bool, now: float) -> None:
        """Let nobody connect in a flood: what was shut out is worked off first. Without attackers that is soon over."""
        if is_attacked and self._detector.is_flooded:
            if not self._paused_until:
                self._files.pause()
            self._paused_until = now + _PAUSE_S
        elif self._paused_until and now > self._paused_until:
            self._files.resume()
            self._paused_until = 0.0
