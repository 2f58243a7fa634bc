"""Starts `gpuprof.profiling.gpu.recorded_run` for one job: as a command for profilers, or by itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuprof.profiling.child.job import DEFAULT_LIMITS, Job
from gpuprof.profiling.child.measurement import save_inputs
from gpuprof.profiling.nsight.tool_process import run_tool

WARM_UP, REPEATS = 3, 5


class RecordedProgram:
    """The program that profilers run, and the files that it reads and leaves.

    Parameters
    ----------
    directory : Path
        Where those files are.
    provider : str
        What runs the model.
    time_limit_s : float
        For each run of it, under a profiler or by itself.
    """

    def __init__(self, job: Job, directory: Path, provider: str, time_limit_s: float = DEFAULT_LIMITS.tool_s) -> None:
        self.directory = directory
        self.time_limit_s = time_limit_s
        self._job = job
        self._provider = provider
        self._turn = 0
        package = str(Path(__file__).parents[3])
        self.path = {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))}
        save_inputs(job, directory / "inputs.npz")

    def command(self, repeats: int = REPEATS, **more: Any) -> list[str]:
        """Return the command line for a task of so many marked runs."""
        self._turn += 1
        task = {
            "model": str(self._job.path.absolute()),
            "inputs": str(self.directory / "inputs.npz"),
            "provider": self._provider,
            "threads": 1,
            "warm_up": WARM_UP,
            "repeats": repeats,
            **more,
        }
        path = self.directory / f"task{self._turn}.json"
        path.write_text(json.dumps(task), encoding="utf-8")
        return [sys.executable, "-m", "gpuprof.profiling.gpu.recorded_run", str(path)]

    def run(self, environment: Mapping[str, str], **more: Any) -> None:
        """Run it by itself.

        Raises
        ------
        UnavailableError
            When it fails or hangs, with its last words.
        """
        whole = {**self.path, **environment}
        log = self.directory / "run.log"
        run_tool(self.command(**more), log=log, time_limit_s=self.time_limit_s, environment=whole)

    def outputs(self, name: str) -> Path:
        """Return where a run leaves its outputs when it is told to, under ``name``."""
        return self.directory / f"{name}.npz"
