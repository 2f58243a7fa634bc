"""The process of `gpuprof.serve`: reads one line of JSON on stdin, serves until stdin ends.

    python -m gpuprof.pipeline.server_process DESCRIPTOR

It writes one line of JSON to the descriptor: its addresses, or the error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from gpuprof.errors import GpuprofError
from gpuprof.pipeline.serve import run_map_server
from gpuprof.pipeline.serve_settings import ServeSettings


def main(arguments: list[str]) -> int:
    """Serve until stdin ends; return the exit code."""
    descriptor = int(arguments[0])
    os.set_inheritable(descriptor, False)  # a worker that outlives this process would keep it open
    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_await_end, daemon=True).start()

    def ready(url: str, models: int, workers: int) -> None:
        _tell(descriptor, {"url": url, "models": models, "workers": workers})

    try:
        run_map_server(order["map_file"], ServeSettings.from_message(order["settings"]), ready)
    except GpuprofError as error:
        _tell(descriptor, {"error": error.message, "fix": error.fix, "kind": type(error).__name__})
        return error.exit_code
    return 0


def _await_end() -> None:
    """Wait for the end of stdin, then send SIGTERM to this process: its parent has ended, or ends the server."""
    while os.read(sys.stdin.fileno(), 4096):  # not through the buffer: a daemon thread must not hold its lock at exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _tell(descriptor: int, answer: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
