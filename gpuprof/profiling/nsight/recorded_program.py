"""Starts `gpuprof.profiling.gpu.recorded_run` for a job: as a command for profilers, or by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpuprof.profiling.child.job import DEFAULT_LIMITS, Job
from gpuprof.profiling.child.measurement import save_inputs
from gpuprof.profiling.child.task import RecordedTask, write_task
from gpuprof.profiling.nsight.tool_process import run_tool
from gpuprof.runtime.module_command import module_command

_WARM_UP, _REPEATS = 3, 5


class RecordedProgram:
    """Program run by profilers, and its input and output files.

    ``directory``: directory of the files; ``provider``: execution provider; ``time_limit_s``: limit for each run of the
    program, with or without a profiler.

    Attributes
    ----------
    task : RecordedTask
        Plain runs in ranges, without further recordings.
    """

    def __init__(self, job: Job, directory: Path, provider: str, time_limit_s: float = DEFAULT_LIMITS.tool_s) -> None:
        self.directory = directory
        self.time_limit_s = time_limit_s
        self._turn = 0
        package = str(Path(__file__).parents[3])
        self.path = {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))}
        self.task = RecordedTask(
            provider=provider,
            model=job.path.absolute(),
            inputs=directory / "inputs.npz",
            warm_up=_WARM_UP,
            repeats=_REPEATS,
        )
        save_inputs(job, self.task.inputs)

    def command(self, task: RecordedTask) -> list[str]:
        """Return the command line for a task: `task`, or a modified copy."""
        self._turn += 1
        path = self.directory / f"task{self._turn}.json"
        path.write_text(write_task(task), encoding="utf-8")
        return module_command("gpuprof.profiling.gpu.recorded_run", str(path))

    def run(self, environment: Mapping[str, str], task: RecordedTask) -> None:
        """Run the program without a profiler.

        Raises `UnavailableError`, with the program's last output, when it fails or hangs.
        """
        whole = {**self.path, **environment}
        log = self.directory / "run.log"
        run_tool(self.command(task), log=log, time_limit_s=self.time_limit_s, environment=whole)

    def outputs(self, name: str) -> Path:
        """Return the file for a run's requested outputs, under ``name``."""
        return self.directory / f"{name}.npz"
