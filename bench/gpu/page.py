"""Writes what a run on a GPU measured as a page of tables in Markdown, with the plots of ``gpuprof report`` beside it.

    python -m bench.gpu.page OUT [TARGET]

OUT is where ``bench/gpu/run.sh`` worked, or what it packed; TARGET, by default OUT/page, gets gpu-results.md and the
plots. A table whose step did not run is left out, and a figure that was not measured is a dash.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_CEILINGS = {
    "float32_flops_per_s": ("float32", 1e12, "TFLOP/s"),
    "tfloat32_flops_per_s": ("TF32", 1e12, "TFLOP/s"),
    "float16_flops_per_s": ("float16", 1e12, "TFLOP/s"),
    "bfloat16_flops_per_s": ("bfloat16", 1e12, "TFLOP/s"),
    "dram_bytes_per_s": ("device memory, read and written", 1e9, "GB/s"),
    "pcie_bytes_per_s": ("host to device, pinned", 1e9, "GB/s"),
    "pcie_d2h_bytes_per_s": ("device to host, pinned", 1e9, "GB/s"),
    "pageable_h2d_bytes_per_s": ("host to device, pageable", 1e9, "GB/s"),
    "pageable_d2h_bytes_per_s": ("device to host, pageable", 1e9, "GB/s"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and return 0; 1 where there is no database."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("target", type=Path, nargs="?")
    options = parser.parse_args(arguments)
    out: Path = options.out
    target: Path = options.target or out / "page"
    if not (out / "gpuprof-db").is_dir():
        print(f"{out} has no gpuprof-db: the run measured nothing", file=sys.stderr)
        return 1
    target.mkdir(parents=True, exist_ok=True)
    plots = _plots(out, target)
    sections = [(title, table) for title, make in _SECTIONS.items() if (table := list(make(out)))]
    text = "".join(f"\n## {title}\n\n" + "\n".join(table) + "\n" for title, table in sections)
    shown = "".join(f"\n![{plot.stem[3:].replace('-', ' ')}]({plot.name})\n" for plot in plots)
    (target / "gpu-results.md").write_text(
        f"# Measured on {device_of(out)}\n{text}\n## Plots\n{shown}", encoding="utf-8"
    )
    print(f"wrote {target / 'gpu-results.md'}: {len(sections)} tables, {len(plots)} plots")
    return 0


def device_of(out: Path) -> str:
    """Return the device that most rows are of."""
    names = [str(row["device"]) for row in _rows(out, "models")] or ["no device"]
    return max(set(names), key=names.count)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown; nothing without rows."""
    lines = [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]
    if lines:
        yield from (f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines)


def _ceilings(out: Path) -> Iterator[str]:
    """What `bench.gpu.ceilings` printed."""
    found = _read_json(out / "01-ceilings.log", "{", "}") or {}
    known = [(title, found[name] / unit, word) for name, (title, unit, word) in _CEILINGS.items() if name in found]
    return table(("at best", "measured", "unit"), known)


def _alone(out: Path) -> Iterator[str]:
    rows = [row for row in _models(out) if row["sm_share_pct"] == 100.0 and row["processes"] == 1]
    names = ("model", "batch", "latency_p50_ms", "latency_p99_ms", "throughput_rps", "memory_peak_bytes", "power_w",
             "max_occupancy_pct", "wavg_occupancy_pct", "dram_pct", "kernel_count", "stable")  # fmt: skip
    head = ("model", "batch", "p50 ms", "p99 ms", "requests/s", "MiB", "W", "max occupancy %", "weighted occupancy %",
            "DRAM %", "kernels", "stable")  # fmt: skip
    return table(head, ([_unit(name, row[name]) for name in names] for row in rows))


def _shares(out: Path) -> Iterator[str]:
    rows = [row for row in _models(out) if row["processes"] == 1]
    kinds = {(row["model"], row["batch"]) for row in rows if row["sm_share_pct"] != 100.0}
    shares = sorted({row["sm_share_pct"] for row in rows if (row["model"], row["batch"]) in kinds})
    p50 = {(row["model"], row["batch"], row["sm_share_pct"]): row["latency_p50_ms"] for row in rows}
    lines = ((model, batch, *(p50.get((model, batch, share)) for share in shares)) for model, batch in sorted(kinds))
    return table(("p50 ms", "batch", *(f"{share:g}%" for share in shares)), lines)


def _wrong(out: Path) -> Iterator[str]:
    rows = (row for row in _rows(out, "models") if row["error"])
    return table(
        ("model", "batch", "share %", "error"),
        ([row[n] for n in ("model", "batch", "sm_share_pct", "error")] for row in rows),
    )


def _colocations(out: Path) -> Iterator[str]:
    rows = [row for row in _rows(out, "colocations") if row["latency_mean_ms"] and row["solo_latency_mean_ms"]]
    return table(
        ("model", "batch", "share %", "beside", "alone ms", "beside ms", "slowdown"),
        (
            (row["model"], row["batch"], row["sm_share_pct"], row["beside"], row["solo_latency_mean_ms"],
             row["latency_mean_ms"], row["latency_mean_ms"] / row["solo_latency_mean_ms"])
            for row in rows
        ),
    )  # fmt: skip


def _interference(out: Path) -> Iterator[str]:
    """Yield the last fit that `gpuprof calibrate` printed, as it stands."""
    logs = sorted(out.glob("04-calibrate-*.log"))
    if logs:
        yield from ("```", logs[-1].read_text(encoding="utf-8").strip(), "```")


def _served_table(out: Path) -> Iterator[str]:
    path = out / "load.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    names = ("model", "rate_rps", "goodput_rps", "predicted_goodput_rps", "p50_ms", "predicted_p50_ms", "p99_ms",
             "predicted_p99_ms", "slo_ms")  # fmt: skip
    return table([name.replace("_", " ") for name in names], ([row.get(name) for name in names] for row in rows))


def _accuracy(out: Path) -> Iterator[str]:
    """What `gpuprof evaluate --json` printed."""
    rows = _read_json(out / "06-evaluate.log", "[", "]") or []
    names = ("setting", "quantity", "predictor", "count", "mean_pct", "median_pct", "p95_pct", "coverage_pct")
    head = ("left out", "quantity", "predictor", "figures", "mean error %", "median %", "p95 %", "in 90% interval, %")
    return table(head, ([row.get(name) for name in names] for row in rows))


def _read_json(log: Path, first: str, last: str) -> Any:
    """Return the JSON in a log, from the first ``first`` to the last ``last``, None where there is none."""
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    return json.loads(text[text.find(first) : text.rfind(last) + 1] or "null")


def _steps(out: Path) -> Iterator[str]:
    with (out / "steps.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return table(head, rows)


_SECTIONS: Mapping[str, Callable[[Path], Iterator[str]]] = {
    "What the device does at best": _ceilings,
    "Models alone": _alone,
    "Under a share of MPS": _shares,
    "Outputs that differ, and what could not be measured": _wrong,
    "Beside one another": _colocations,
    "Interference: iGniter's coefficients, and each model's error": _interference,
    "Served: measured and predicted": _served_table,
    "Estimates of what was left out": _accuracy,
    "Steps: exit codes and seconds": _steps,
}


def _plots(out: Path, target: Path) -> list[Path]:
    """Let ``gpuprof report`` draw what it can of the database, the map and the load; return the plots."""
    from gpuprof.errors import GpuprofError
    from gpuprof.pipeline.report import report

    sources = [path for name in ("gpuprof-db", "map.json", "load.json") if (path := out / name).exists()]
    for old in target.glob("*.svg"):
        old.unlink()
    page = target / "report.html"
    try:
        report(sources, page, figures=target)
    except GpuprofError:  # a file that was cut off with its step must not take the others with it
        report(sources[:1], page, figures=target)
    return sorted(target.glob("*.svg"))


def _models(out: Path) -> list[Row]:
    """Return a row of each workload, by model, batch and share: stable rather than not, with its kernels, the last."""
    chosen: dict[tuple[Any, ...], Row] = {}
    for row in sorted(
        _rows(out, "models"), key=lambda row: (bool(row["stable"]), row["kernel_count"] or 0, row["run_id"])
    ):
        if not row["error"] and row["latency_p50_ms"]:
            chosen[row["model"], row["batch"], row["sm_share_pct"], row["processes"]] = row
    return [chosen[key] for key in sorted(chosen)]


def _rows(out: Path, name: str) -> list[Row]:
    from gpuprof.kernel_db.store import KernelDb

    rows: list[Row] = KernelDb(out / "gpuprof-db").read_table(name).to_pylist()
    return rows


def _unit(name: str, value: Any) -> object:
    return value / 2**20 if name.endswith("_bytes") and value is not None else value


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
