"""Runs the simulator's event loop: as plain Python at first, as machine code once available.

Simulations of few requests end before numba is imported, and compiling takes a while. Both versions give the same
outcome, bit for bit, so a longer run continues in machine code from its current state.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import numpy as np

from gpuprof.machine.machine_code import compile_function, is_machine_code_cached
from gpuprof.runtime.module_command import module_command
from gpuprof.simulator import kernel
from gpuprof.simulator.state import ClusterArrays, State, Tally

#: Time in plain Python after which a run looks for machine code, again and again.
_PLAIN_S = 1.0

_compiled: Any = None
_child: int | None = None  # process id


class EventLoop:
    """The event loop of a run."""

    def __init__(self) -> None:
        self._next_look = time.monotonic() + _PLAIN_S
        self._reached, self._step = 0, 1

    def run(self, cluster: ClusterArrays, state: State, tally: Tally, until: int) -> int:
        """Process all events before ``until``; return the reason for stopping, like `kernel.run`."""
        while _compiled is None and not self._finds_machine_code():
            stop, began = min(until, self._reached + self._step), time.monotonic()
            status = kernel.run(view(cluster), view(state), view(tally), stop)
            is_short = time.monotonic() - began < _PLAIN_S / 10
            self._step = self._step * 2 if is_short else max(1, self._step // 2)
            if status != kernel.TIME_UP:
                return status
            self._reached = stop
            if stop == until:
                return status
        return int(_compiled(cluster, state, tally, until))

    def _finds_machine_code(self) -> bool:
        """Return whether machine code is available, checked about once a second."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _PLAIN_S
        return _prepare_machine_code()


def view(arrays: Any) -> Any:
    """Return the named tuple with memory views of its arrays, which plain Python reads several times faster."""
    return type(arrays)(*(_view(name, value) for name, value in arrays._asdict().items()))


def _view(name: str, value: Any) -> Any:
    if hasattr(value, "_fields"):
        return view(value)
    if not isinstance(value, np.ndarray):
        return value
    return value.tolist() if name == "latency_ms" else value.data


def use_machine_code() -> None:
    """Load the event loop's machine code from the cache or compile it, for all further runs."""
    global _compiled
    if _compiled is None:
        _compiled = compile_function(kernel.run_compiled)


def stop_compiling() -> None:
    """End the compiling process, if any: before a measurement, or at the end of a test."""
    global _child
    if _child is not None:
        with suppress(OSError):  # over already
            os.kill(_child, signal.SIGTERM)
            os.waitpid(_child, 0)
        _child = None


def _prepare_machine_code() -> bool:
    """Return whether machine code of the event loop is available; if not, start a process that compiles it."""
    global _child
    if is_machine_code_cached(kernel.run_compiled):
        use_machine_code()
        return True
    if _child is None:
        command = module_command("gpuprof.simulator.compile_ahead")
        file_actions = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)]
        # The compiling process outlives this process, so that the next long run finds the machine code.
        with suppress(OSError):
            _child = os.posix_spawn(command[0], command, os.environ, file_actions=file_actions, setsid=True)
    return False
