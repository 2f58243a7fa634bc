"""Sections of a report on the measurements of a kernel database."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace

from gpuprof.domain.plural import count_of
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import DeviceRow, KernelRow, ModelRow, OpRow, RunRow
from gpuprof.kernel_db.store import KernelDb
from gpuprof.reporting.document import Section, Table, make_table
from gpuprof.reporting.figures import batch_and_share_figures, roofline_figure, timeline_figure


def make_database_sections(database: KernelDb, name: str) -> list[Section]:
    """Return the sections of a database, called ``name`` in the report.

    Raises `InputError` when a file of the database is damaged.
    """
    models = [row for row in read_records(database, ModelRow) if not row.error]
    devices: dict[str, DeviceRow] = {}
    for row in read_records(database, DeviceRow):  # a later run may know less of the device
        earlier = devices.get(row.device, row)
        devices[row.device] = replace(
            earlier, **{name: value for name, value in asdict(row).items() if value is not None}
        )
    by_model: dict[str, list[ModelRow]] = {}
    for measured in models:
        by_model.setdefault(measured.model, []).append(measured)
    collectors = sorted({run.collector for run in read_records(database, RunRow) if run.collector})
    text = f"{name}: {count_of(len(models), 'workload')} of {count_of(len(by_model), 'model')}"
    text += f", measured by {', '.join(collectors)}." if collectors else "."
    sections = [Section("Profiles", text, tuple(batch_and_share_figures(models)), _make_index(by_model), "measured")]
    for model_rows in by_model.values():
        section = _make_model_section(database, model_rows, devices, is_only=len(by_model) == 1)
        if section is not None:
            sections.append(replace(section, is_folded=len(by_model) > 1))
    return sections


def _make_index(by_model: Mapping[str, Sequence[ModelRow]]) -> Table:
    """Return a table of the measurements, a row for each model."""
    rows = [
        {
            "model": model,
            "device": ", ".join(sorted({row.device for row in rows_of_model})),
            "batches": _list_numbers({row.batch for row in rows_of_model}),
            "shares": _list_numbers({row.sm_share_pct for row in rows_of_model if row.sm_share_pct is not None}),
            "workloads": len(rows_of_model),
            "least_ms": min((row.latency_p50_ms for row in rows_of_model if row.latency_p50_ms), default=None),
            "most_rps": max((row.throughput_rps for row in rows_of_model if row.throughput_rps), default=None),
        }
        for model, rows_of_model in by_model.items()
    ]
    columns = "model device batches shares:shares_in_% workloads least_ms:least_batch_ms most_rps:most_requests/s"
    return make_table(rows, columns)


def _list_numbers(values: Collection[float]) -> str:
    """Return numbers in their order, many by their ends."""
    ordered = sorted(values)
    if len(ordered) > 5:
        return f"{ordered[0]:g} … {ordered[-1]:g}"
    return ", ".join(f"{value:g}" for value in ordered) or "–"


def _make_model_section(
    database: KernelDb, rows_of_model: Sequence[ModelRow], devices: Mapping[str, DeviceRow], is_only: bool
) -> Section | None:
    """Return the figures of one model: its ops, and batches and shares unless it is the only model."""
    measured, ops = _find_largest_with_ops(database, rows_of_model)
    where = {"run_id": measured.run_id, "model": measured.model}
    kernels = read_records(database, KernelRow, where)
    workload = f"{measured.model}, batch {measured.batch}"
    charts = (
        roofline_figure(f"{workload}: roofline", ops, devices.get(measured.device)),
        timeline_figure(f"{workload}: timeline", ops, kernels),
        *([] if is_only else batch_and_share_figures(rows_of_model, measured.model)),
    )
    figures = tuple(chart for chart in charts if chart is not None)
    text = f"{count_of(len(ops), 'op')} on {measured.device}, batch {measured.batch}." if ops else ""
    return Section(measured.model, text, figures, source="measured") if figures else None


def _find_largest_with_ops(database: KernelDb, rows_of_model: Sequence[ModelRow]) -> tuple[ModelRow, list[OpRow]]:
    """Return the largest batch with measured ops, and these ops in order; else the largest batch without ops."""
    ordered = sorted(rows_of_model, key=lambda row: (row.batch, row.run_id), reverse=True)
    by_run = {row.run_id: row for row in reversed(ordered)}
    for row in ordered:
        if by_run.pop(row.run_id, None) is None:
            continue
        where = {"run_id": row.run_id, "model": row.model}
        if ops := sorted(read_records(database, OpRow, where), key=lambda op: op.position):
            return row, ops
    return ordered[0], []
