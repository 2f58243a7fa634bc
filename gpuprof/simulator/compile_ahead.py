"""Compiles the simulator's event loop, and keeps the machine code on disk for other processes.

python -m gpuprof.simulator.compile_ahead
"""

from __future__ import annotations

import fcntl
from contextlib import suppress

from gpuprof.machine.machine_code import code_directory
from gpuprof.simulator import kernel
from gpuprof.simulator.compilation import use_machine_code
from gpuprof.simulator.engine import simulate_nothing


def main() -> None:
    """Compile for the types of a simulation; a lock lets a single process compile while others wait."""
    directory = code_directory(kernel.run)  # the directory depends on the module only
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        use_machine_code()
        simulate_nothing()


if __name__ == "__main__":
    main()
