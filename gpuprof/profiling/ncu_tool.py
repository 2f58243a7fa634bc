"""Finds and runs Nsight Compute over the program that is to be counted."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuprof.errors import UnavailableError
from gpuprof.profiling.ncu_metrics import METRIC_SETS, listed_metrics, resolve
from gpuprof.profiling.ncu_report import Counters, known_failure, parse_ncu_csv
from gpuprof.profiling.timeline import RUN_RANGE
from gpuprof.profiling.tool_process import run_tool

_VERSION = re.compile(r"(?:Version\s+)(\d{4}\.\d+(?:\.\d+)*)")
_PLACES = ("opt/nvidia/nsight-compute/*/ncu", "usr/local/cuda*/bin/ncu")
_QUERY_S = 120.0
#: Clocks as they are and caches warm, as when the model runs by itself; both stand in the run's settings.
CONDITIONS = {"clock_control": "none", "cache_control": "none"}


def find_ncu() -> Path | None:
    """Return the program: on the PATH, or where NVIDIA's packages put it; None without one."""
    found = shutil.which("ncu")
    if found is not None:
        return Path(found)
    candidates = [path for place in _PLACES for path in sorted(Path("/").glob(place), reverse=True)]
    return candidates[0] if candidates else None


def ncu_version(binary: Path) -> str | None:
    """Return ``"2025.1.0"``; None when the program does not run."""
    try:
        done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(done.stdout)
    return match[1] if match else None


def count(
    command: Sequence[str],
    directory: Path,
    *,
    metrics: str,
    time_limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> tuple[Counters, tuple[str, ...]]:
    """Run ``command`` under ncu and return what was counted in its marked runs, and notes.

    Parameters
    ----------
    metrics : str
        A key of `gpuprof.profiling.ncu_metrics.METRIC_SETS`.

    Raises
    ------
    UnavailableError
        When ncu is missing, may not count, or fails or hangs.
    """
    binary = find_ncu()
    if binary is None:
        raise UnavailableError("ncu is not installed", "install Nsight Compute (CUDA toolkit)")
    names, missing = resolve(METRIC_SETS[metrics], _listed(binary))
    launches = ["launch__registers_per_thread", "launch__waves_per_multiprocessor"]
    launches += [f"launch__shared_mem_per_block_{kind}" for kind in ("static", "dynamic")]
    table, log = directory / "ncu.csv", directory / "ncu.log"
    options = ["--config-file", "off", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)]
    options += ["--target-processes", "all", "--nvtx", "--nvtx-include", f"{RUN_RANGE}/"]
    options += ["--clock-control", CONDITIONS["clock_control"], "--cache-control", CONDITIONS["cache_control"]]
    options += ["--graph-profiling", "node", "--metrics", ",".join([*names.values(), *launches])]
    whole = [str(binary), *options, *command]
    printed = run_tool(
        whole,
        log=log,
        time_limit_s=time_limit_s,
        environment=environment,
        explain=lambda said: known_failure(said + _content(table)),
    ).printed
    notes = tuple(f"this GPU has no counter for {column}" for column in missing)
    return parse_ncu_csv(_content(table) or printed, "ncu's table"), notes


def _listed(binary: Path) -> frozenset[str]:
    """Return the counters of this machine's GPU; empty where ncu will not say."""
    try:
        done = subprocess.run(
            [str(binary), "--query-metrics"], capture_output=True, text=True, timeout=_QUERY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return listed_metrics(done.stdout) if done.returncode == 0 else frozenset()


def _content(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
