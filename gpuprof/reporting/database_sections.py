"""What a report shows of a kernel database: all workloads at a glance, then each model's roofline and timeline."""

from __future__ import annotations

from dataclasses import asdict, replace

from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import DeviceRow, KernelRow, ModelRow, OpRow
from gpuprof.kernel_db.store import KernelDb
from gpuprof.reporting.document import Section
from gpuprof.reporting.profile_figures import over_figures, roofline_figure, timeline_figure

_MOST_WORKLOADS = 8


def database_sections(database: KernelDb, name: str) -> list[Section]:
    """Return the sections of a database that the report calls ``name``.

    Raises
    ------
    InputError
        When a file of it is damaged.
    """
    models = [row for row in read_records(database, ModelRow) if not row.error]
    devices: dict[str, DeviceRow] = {}
    for row in read_records(database, DeviceRow):  # a later run may know less of the device
        earlier = devices.get(row.device, row)
        devices[row.device] = replace(
            earlier, **{name: value for name, value in asdict(row).items() if value is not None}
        )
    sections = [Section("Profiles", f"{name}: {len(models)} measured workloads.", tuple(over_figures(models)))]
    for model in list(dict.fromkeys(row.model for row in models))[:_MOST_WORKLOADS]:
        last = max((row for row in models if row.model == model), key=lambda row: (row.batch, row.run_id))
        if (section := _workload_section(database, last, devices.get(last.device))) is not None:
            sections.append(section)
    return sections


def _workload_section(database: KernelDb, measured: ModelRow, device: DeviceRow | None) -> Section | None:
    where = {"run_id": measured.run_id, "model": measured.model}
    ops = sorted(read_records(database, OpRow, where), key=lambda op: op.position)
    kernels = read_records(database, KernelRow, where)
    workload = f"{measured.model}, batch {measured.batch}"
    charts = (
        roofline_figure(f"{workload}: roofline", ops, device),
        timeline_figure(f"{workload}: timeline", ops, kernels),
    )
    shown = tuple(chart for chart in charts if chart is not None)
    text = f"{len(ops)} ops on {measured.device}, batch {measured.batch}."
    return Section(measured.model, text, shown) if shown else None
