"""Finds and runs Nsight Compute over the program that is to be counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from gpuprof.errors import UnavailableError
from gpuprof.profiling.nsight.ncu_metrics import METRIC_SETS, listed_metrics, resolve_metrics
from gpuprof.profiling.nsight.ncu_report import Counters, known_failure, parse_ncu_csv
from gpuprof.profiling.nsight.tool_process import ask_tool, find_tool, run_tool
from gpuprof.profiling.timeline.timeline import RUN_RANGE

_QUERY_S = 120.0
#: Clocks as they are and caches warm, as when the model runs by itself; both stand in the run's settings.
CONDITIONS = {"clock_control": "none", "cache_control": "none"}


def find_ncu() -> Path | None:
    """Return the program; None where it is not installed."""
    return find_tool("ncu")


def count_events(
    command: Sequence[str],
    directory: Path,
    *,
    metrics: str,
    time_limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> tuple[Counters, tuple[str, ...]]:
    """Run ``command`` under ncu and return what was counted in its marked runs, and notes.

    ``metrics``: a key of `gpuprof.profiling.nsight.ncu_metrics.METRIC_SETS`. Raises `UnavailableError` when ncu is
    missing, may not count, or fails or hangs.
    """
    binary = find_ncu()
    if binary is None:
        raise UnavailableError("ncu is not installed", "install Nsight Compute (CUDA toolkit)")
    names, missing = resolve_metrics(METRIC_SETS[metrics], _list_metrics(binary))
    # Known without counting, so that they cost no further pass over a kernel.
    launches = ["launch__registers_per_thread", "launch__waves_per_multiprocessor"]
    launches += [f"launch__shared_mem_per_block_{kind}" for kind in ("static", "dynamic")]
    table, log = directory / "ncu.csv", directory / "ncu.log"
    # A user's own configuration could change the columns that are parsed below.
    options = ["--config-file", "off", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)]
    options += ["--target-processes", "all", "--nvtx", "--nvtx-include", f"{RUN_RANGE}/"]
    options += ["--clock-control", CONDITIONS["clock_control"], "--cache-control", CONDITIONS["cache_control"]]
    # Node by node: a CUDA graph counted as a whole has no kernels.
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


@cache
def _list_metrics(binary: Path) -> frozenset[str]:
    """Return the counters of this machine's GPU, which takes ncu seconds; empty where it will not say."""
    return listed_metrics(ask_tool([str(binary), "--query-metrics"], _QUERY_S) or "")


def _content(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
