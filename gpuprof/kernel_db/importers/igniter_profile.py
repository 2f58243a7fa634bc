"""iGniter's profile of a GPU and its models: lines of JSON, ``{"model or hardware": {"key": value}}``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpuprof.errors import InputError
from gpuprof.kernel_db.importers.source import Source
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, ModelRow, workload_label
from gpuprof.kernel_db.store import Run

DEVICE = "v100"
#: Rows of the published matrices are batches, columns shares.
BATCHES = (1, 16, 32)
SHARES_PCT = (10.0, 50.0, 100.0)
#: Batch size of the L2 utilisation and of the runs of two copies.
L2_BATCH = 16
_HALF_PCT = 50.0
_NOTES = "iGniter section 3.1; latency is the time on the GPU; what fits no column is in settings as published"


def recognizes(source: Source) -> bool:
    """Return whether the first line of ``source`` is that of an iGniter profile."""
    try:
        first = json.loads(source.text.lstrip().split("\n", 1)[0])
    except ValueError:
        return False
    return isinstance(first, dict) and len(first) == 1 and all(isinstance(value, dict) for value in first.values())


def read_runs(source: Source, device: str | None) -> Iterable[Run]:
    """Return the profile as a run: models at 3 batches under 3 shares, two copies at once, and the device.

    Raises `InputError` with the line number, for a line foreign to the format, or naming a missing or garbled key.
    """
    tables = parse_tables(source.text, source.path)
    hardware = tables.pop("hardware", {})
    run = source.run(
        device or DEVICE,
        "import:igniter",
        _NOTES,
        runtime="tensorrt",
        settings=json.dumps({"hardware": hardware, **tables}, sort_keys=True),
    )
    try:
        models = [
            row for name, table in tables.items() for row in _make_model_rows(run.run_id, run.device, name, table)
        ]
        pairs = [
            row
            for group, (name, table) in enumerate(sorted(tables.items()))
            for row in _make_copy_rows(run.run_id, run.device, group, name, table)
        ]
        devices = [_make_device_row(run.run_id, run.device, hardware)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(
            f"{source.path}: the profile lacks or garbles {error}", "name the config.jsonl of iGniter's tools, whole"
        ) from None
    yield Run(run, devices=devices, models=models, colocations=pairs)


def parse_tables(text: str, path: Path) -> dict[str, dict[str, Any]]:
    """Return the table of the hardware and of each model in a profile.

    Raises `InputError` with the line number, for a line that is none of a profile's.
    """
    tables: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            for name, content in json.loads(line).items():
                tables.setdefault(name, {}).update(content)
        except (ValueError, AttributeError, TypeError):
            raise InputError(
                f"{path}:{number}: not a line of an iGniter profile", "name the config.jsonl of its tools"
            ) from None
    return tables


def _make_model_rows(run_id: str, device: str, name: str, table: Mapping[str, Any]) -> Iterable[ModelRow]:
    for i, batch in enumerate(BATCHES):
        for j, share in enumerate(SHARES_PCT):
            alone_twice = (batch, share) == (L2_BATCH, _HALF_PCT)
            yield ModelRow(
                run_id=run_id,
                model=name,
                device=device,
                batch=batch,
                sm_share_pct=share,
                latency_mean_ms=float(table["gpulatency"][i][j]),
                power_w=float(table["power"][i][j]),
                clock_mhz=float(table["frequency"][i][j]),
                l2_pct=float(table["l2caches"][j]) if batch == L2_BATCH and "l2caches" in table else None,
                h2d_bytes=batch * int(table["inputdata"]),
                d2h_bytes=batch * int(table["outputdata"]),
                dispatch_ms=table.get("idletime_1") if alone_twice else None,
            )


def _make_copy_rows(
    run_id: str, device: str, group: int, name: str, table: Mapping[str, Any]
) -> Iterable[ColocationRow]:
    """Return the rows of two concurrent copies, each on half of the device."""
    if "activetime_2" not in table:
        return
    for member in range(2):
        yield ColocationRow(
            run_id=run_id,
            device=device,
            group=group,
            member=member,
            model=name,
            batch=L2_BATCH,
            beside=workload_label(name, L2_BATCH, _HALF_PCT, None, 1),
            sm_share_pct=_HALF_PCT,
            latency_mean_ms=float(table["activetime_2"]),
            solo_latency_mean_ms=table.get("activetime_1"),
            power_w=table.get("power_2"),
            clock_mhz=table.get("frequency_2"),
        )


def _make_device_row(run_id: str, device: str, hardware: Mapping[str, Any]) -> DeviceRow:
    return DeviceRow(
        run_id=run_id,
        device=device,
        kind="gpu",
        clock_mhz=hardware.get("maxGPUfrequency"),
        max_power_w=hardware.get("maxGPUpower"),
        idle_power_w=hardware.get("idlepower"),
        measured=True,
        source="iGniter's profile",
    )
