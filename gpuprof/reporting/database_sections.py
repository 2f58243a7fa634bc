"""What a report shows of a kernel database: all workloads at a glance, then each model's roofline and timeline."""

from __future__ import annotations

from typing import Any

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
    models = [row for row in database.read("models").to_pylist() if not row["error"]]
    devices: dict[str, dict[str, Any]] = {}
    for row in database.read("devices").to_pylist():  # a later run may know less of the device
        known = {name: value for name, value in row.items() if value is not None}
        devices[row["device"]] = devices.get(row["device"], {}) | known
    sections = [Section("Profiles", f"{name}: {len(models)} measured workloads.", tuple(over_figures(models)))]
    for model in list(dict.fromkeys(row["model"] for row in models))[:_MOST_WORKLOADS]:
        last = max((row for row in models if row["model"] == model), key=lambda row: (row["batch"], row["run_id"]))
        ops = database.read("ops", where={"run_id": last["run_id"], "model": model}).to_pylist()
        ops.sort(key=lambda op: op["position"])
        kernels = database.read("kernels", where={"run_id": last["run_id"], "model": model}).to_pylist()
        workload = f"{model}, batch {last['batch']}"
        charts = (
            roofline_figure(f"{workload}: roofline", ops, devices.get(last["device"])),
            timeline_figure(f"{workload}: timeline", ops, kernels),
        )
        if shown := tuple(chart for chart in charts if chart is not None):
            sections.append(Section(model, f"{len(ops)} ops on {last['device']}, batch {last['batch']}.", shown))
    return sections
