"""Finds and runs Nsight Compute over the program that is to be counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.profiling.nsight.ncu_report import (
    ONE_PASS,
    Counters,
    CountersRefusedError,
    known_failure,
    listed_metrics,
    parse_ncu_csv,
    read_text,
    resolve_metrics,
)
from gpuprof.profiling.nsight.tool_process import ask_tool, find_tool, run_tool
from gpuprof.profiling.timeline.timeline import RUN_RANGE

#: Clocks unlocked and caches warm, as in normal runs of the model; both are recorded in the run's settings.
CONDITIONS = {"clock_control": "none", "cache_control": "none"}
#: Modes of counting, in order of preference: a single pass in a single run of the program; replay of each kernel;
#: replay of a single launch of each kernel and grid.
_MODES: Mapping[str, tuple[str, ...]] = {
    "application replay": ("--replay-mode", "application"),
    "kernel replay": ("--replay-mode", "kernel"),
    "kernel replay of distinct launches": (
        *("--replay-mode", "kernel"),
        *("--filter-mode", "per-launch-config", "--launch-count", "1"),
    ),
}


def find_ncu() -> Path | None:
    """Return the path of ncu; None if not installed."""
    return find_tool("ncu")


def count_events(
    command: Sequence[str],
    directory: Path,
    *,
    time_limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> tuple[Counters, tuple[str, ...]]:
    """Run ``command`` under ncu and return the counters of its marked runs, and notes, including the mode of counting.

    After a failed or hung mode the next mode is tried. Raises `UnavailableError` when ncu is missing, lacks permission
    to count, or fails in all modes.
    """
    binary = find_ncu()
    if binary is None:
        raise UnavailableError("ncu is not installed", "install Nsight Compute (CUDA toolkit)")
    names, missing = resolve_metrics(ONE_PASS, _list_metrics(binary))
    notes = tuple(f"this GPU has no counter for {column}" for column in missing)
    # Facts of a launch need no pass over the kernel.
    launches = ["launch__registers_per_thread", "launch__waves_per_multiprocessor"]
    launches += [f"launch__shared_mem_per_block_{kind}" for kind in ("static", "dynamic")]
    metrics = ",".join([*names.values(), *launches, "sm__maximum_warps_per_active_cycle_pct"])
    failures: list[GpuprofError] = []
    for number, (mode, options) in enumerate(_MODES.items()):
        table = directory / f"ncu{number}.csv"
        try:
            output = _run_ncu(binary, [*options, "--metrics", metrics], command, table, time_limit_s, environment)
            counters = parse_ncu_csv(output, "ncu's table")
        except CountersRefusedError:
            raise
        except (InputError, UnavailableError) as error:
            failures.append(error)
            continue
        counters = replace(counters, distinct=mode.endswith("distinct launches"))
        return counters, (*notes, f"counters by {mode}", *(f"not by an earlier mode: {error}" for error in failures))
    raise failures[-1]


def _run_ncu(
    binary: Path,
    options: Sequence[str],
    command: Sequence[str],
    table: Path,
    time_limit_s: float,
    environment: Mapping[str, str] | None,
) -> str:
    """Return the table written by ncu, or without a table ncu's output."""
    # A user's own configuration could change the columns that are parsed.
    fixed = ["--config-file", "off", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)]
    fixed += ["--target-processes", "all", "--nvtx", "--nvtx-include", f"{RUN_RANGE}/"]
    fixed += ["--clock-control", CONDITIONS["clock_control"], "--cache-control", CONDITIONS["cache_control"]]
    # Node by node: a CUDA graph counted as a whole has no kernels.
    fixed += ["--graph-profiling", "node"]

    def explain_refusal(output: str) -> UnavailableError | None:
        return known_failure(output + (read_text(table) if table.exists() else ""))

    log = table.with_suffix(".log")
    whole = [str(binary), *fixed, *options, *command]
    output = run_tool(whole, log=log, time_limit_s=time_limit_s, environment=environment, explain=explain_refusal)
    return (read_text(table) if table.exists() else "") or output


@cache
def _list_metrics(binary: Path) -> frozenset[str]:
    """Return the names of this machine's GPU counters, which takes ncu seconds; empty if not reported."""
    return listed_metrics(ask_tool([str(binary), "--query-metrics"]) or "")
