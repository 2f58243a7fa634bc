"""Starts child processes, exchanges messages with them, and ends them reliably."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from gpuprof import errors
from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.profiling.child.task import ChildTask, write_task
from gpuprof.runtime.module_command import module_command

_LOG_TAIL = 300
_MODULE = "gpuprof.profiling.child.child"


class Child:
    """A ``gpuprof.profiling.child.child`` process with its task.

    ``what``: name of the task in messages, ``"resnet50 at batch 8"``; ``prefix``: command of a profiler that runs the
    child; ``environment``: variables added to this process's own; ``module``: the child's program, or another with the
    same protocol.
    """

    def __init__(
        self,
        task: ChildTask,
        what: str,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        module: str = _MODULE,
    ) -> None:
        self.what = what
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - lives as long as the child
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [*prefix, *module_command(module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            # A separate process group: all descendants end with the child, and Ctrl-C reaches only the parent.
            start_new_session=True,
        )
        self._pending = b""
        self.tell(write_task(task))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def process_id(self) -> int:
        """Id of the process, and of its process group."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Send a line; an ended child is detected at the next `expect`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def expect(self, event: str, within_s: float) -> dict[str, Any]:
        """Return the child's next message, which must be ``event``.

        Raises `GpuprofError`: the child's own error, or `UnavailableError` when the child died or was silent for
        ``within_s`` seconds.
        """
        message = self._next(within_s)
        if message["event"] == "error":
            kind: type[GpuprofError] = getattr(errors, message["kind"], UnavailableError)
            raise kind(message["message"], message["fix"])
        if message["event"] != event:
            raise UnavailableError(f"profiling {self.what}: expected {event!r} but the child said {message['event']!r}")
        return message

    def end(self) -> None:
        """Kill the child and its descendants, and wait for the child."""
        with suppress(ProcessLookupError):
            # The group, since a profiler runs the model in a process below its own.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _next(self, within_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + within_s
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise UnavailableError(
                    f"profiling {self.what}: no answer within {within_s:g} s, so it was ended", "raise --time-limit"
                )
            # Read from the descriptor: select does not see the buffer of the file object.
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                raise self._exit_error()
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _exit_error(self) -> UnavailableError:
        code = self._process.wait()
        cause = f"exit code {code}"
        if code < 0:
            cause = f"signal {signal.Signals(-code).name}"
        # SIGKILL comes from Linux for a process with too much memory; nothing else here sends it.
        fix = "out of memory? try a smaller batch" if code == -signal.SIGKILL else self._read_log_tail()
        return UnavailableError(f"profiling {self.what}: the process died ({cause})", fix)

    def _read_log_tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"its last words: {lines[-1][:_LOG_TAIL]}" if lines else ""
