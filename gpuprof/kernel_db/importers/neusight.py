"""NeuSight's measurements (ASPLOS'25): single ops with their launched kernels, and whole transformers.

The files are ``data/dataset/train/collect/<op>/<version>/<GPU>.csv`` and
``data/label/<GPU>/<model>-inf-<sequence>-<batch>.json`` of its repository, and the tables gpuprof derives from them:
``ops.parquet``, ``models.csv``. All values are float32 on CUDA cores (PyTorch eager, TF32 off).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from gpuprof.domain.catalogue import device_of_driver, devices
from gpuprof.errors import InputError
from gpuprof.kernel_db.importers.published_op import describe_op, op_row
from gpuprof.kernel_db.importers.source import Source
from gpuprof.kernel_db.schema import PER_OP, KernelRow, ModelRow, OpRow, RunRow
from gpuprof.kernel_db.store import Run

LICENCE = "MIT, (c) 2025 Georgia Institute of Technology and Microsoft Corporation"
_NOTES = f"sitar-lab/NeuSight, data of ASPLOS'25; {LICENCE}; PyTorch eager, float32 without TF32"
_CSV = {"OPName", "Latency", "Device", "Kernel Name", "Grid x", "Block x"}
_TABLE = {"op", "device", "latency_ms", "kernel", "grid_x", "block_x", "torch"}
_MODELS = {"device", "model", "sequence", "batch", "fused", "latency_ms"}
_LABEL = re.compile(r"(?P<model>.+)-inf-(?P<sequence>\d+)-(?P<batch>\d+)(?P<fused>-fusion)?\.json")
#: Column of the repository's files → column of gpuprof's table (``Kernel_Szie`` is the repository's spelling).
_RENAMED = {
    "OPName": "op",
    "Latency": "latency_ms",
    "Device": "device_name",
    "Torch Version": "torch",
    "Kernel Name": "kernel",
    "Input_Channel": "in_channels",
    "Output_Channel": "out_channels",
    "Kernel_Szie": "kernel_size",
    **{f"{part} {axis}": f"{part.lower()}_{axis}" for part in ("Grid", "Block") for axis in "xyz"},
}
_SIZES = ["b", "m", "n", "k", "h", "in_channels", "out_channels", "kernel_size", "input_size", "stride", "padding"]
_LAUNCH = ["grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"]


def recognizes(source: Source) -> bool:
    """Return whether ``source`` is a file listed in the module's docstring."""
    if source.path.suffix == ".parquet":
        return set(source.columns()) >= _TABLE
    if source.path.suffix == ".json":
        return _LABEL.fullmatch(source.path.name) is not None
    header = set(source.header())
    return header >= _CSV or header >= _MODELS


def read_runs(source: Source, device: str | None) -> Iterable[Run]:
    """Return a run for each GPU and version of PyTorch of the file.

    Raises `InputError` for a GPU missing from the catalogue, an invalid number, or an unknown op.
    """
    if source.path.suffix == ".json":
        yield _read_label(source, device)
        return
    if source.path.suffix != ".parquet" and set(source.header()) >= _MODELS:
        yield from _read_models(source)
        return
    groups: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for line, row in _list_rows(source):
        # The repository writes versions as "p2.1.0" in places.
        groups[_name_device(source, line, row, device), str(row["torch"]).removeprefix("p")].append((line, row))
    for (name, version), rows in groups.items():
        run = source.run(name, "import:neusight", _NOTES, PER_OP, **_describe_conditions(version, "eager"))
        pairs = [_read_op(source, run, line, row) for line, row in rows]
        yield Run(run, ops=[op for op, _ in pairs], kernels=[kernel for _, kernel in pairs])


def _describe_conditions(version: str, mode: str) -> dict[str, str]:
    return {
        "runtime": "pytorch",
        "runtime_version": version,
        "provider": f"cuda, {mode}",
        "precision": "float32",
        "settings": json.dumps({"allow_tf32": False}),
    }


def _list_rows(source: Source) -> Iterable[tuple[int, dict[str, Any]]]:
    if source.path.suffix == ".parquet":
        return list(enumerate(source.records(), 1))
    return [
        (line, {_RENAMED.get(name, name.lower()): value or None for name, value in row.items()})
        for line, row in source.rows()
    ]


def _name_device(source: Source, line: int, row: Mapping[str, Any], device: str | None) -> str:
    if row.get("device") in devices():
        return str(row["device"])
    driver_name = str(row.get("device_name") or source.path.parent.name)
    known = device_of_driver(driver_name)
    if known is None and device is None:
        raise InputError(f"{source.path}:{line}: no GPU of the catalogue is called {driver_name!r}", "give --device")
    return device or (known.name if known else "")


def _read_op(source: Source, run: RunRow, line: int, row: Mapping[str, Any]) -> tuple[OpRow, KernelRow]:
    latency_ms = source.record_number(line, row, "latency_ms")
    sizes = {name: int(source.record_number(line, row, name)) for name in _SIZES if _is_given(row.get(name))}
    try:
        op = describe_op(str(row["op"]), sizes, "float32")
    except KeyError as error:
        raise InputError(f"{source.path}:{line}: op {row['op']!r} with {sizes} lacks {error}") from None
    batch = sizes.get("b", 1)
    launch = {name: int(source.record_number(line, row, name)) for name in _LAUNCH if _is_given(row.get(name))}
    kernel = KernelRow(
        run_id=run.run_id,
        model=PER_OP,
        device=run.device,
        batch=batch,
        name=str(row["kernel"]),
        position=0,
        op_signature=op.signature,
        op_type=op.op_type,
        op_name=op.name,
        runtime=run.runtime,
        execution="eager",
        precision=run.precision,
        **launch,  # type: ignore[arg-type]
    )
    kernels = [name for name in str(row.get("kernels") or "").split(";") if name and name != "nan"]
    note = f"{len(kernels)} kernels: {'; '.join(kernels)}" if len(kernels) > 1 else None
    return op_row(run, op, batch, latency_ms, "eager", note), kernel


def _read_models(source: Source) -> Iterable[Run]:
    runs: dict[tuple[str, bool], Run] = {}
    for line, row in source.rows():
        fused = row["fused"].lower() == "true"
        name = _name_device(source, line, row, None)
        if (name, fused) not in runs:
            mode = "torch.compile" if fused else "eager"
            runs[name, fused] = Run(
                source.run(name, "import:neusight", _NOTES, **_describe_conditions("2.1.0", mode)), models=[]
            )
        run = runs[name, fused]
        model = f"{row['model']}@{row['sequence']}"
        latency = source.require_number(line, row, "latency_ms")
        batch = int(source.require_number(line, row, "batch"))
        run.models.append(_make_model_row(run.run, model, batch, latency, fused))  # type: ignore[attr-defined]
    return runs.values()


def _read_label(source: Source, device: str | None) -> Run:
    match = _LABEL.fullmatch(source.path.name)
    name = _name_device(source, 1, {}, device)
    try:
        latency = json.loads(source.text)["e2e_latency"]
        if match is None or not isinstance(latency, int | float) or not 0 < latency < math.inf:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{source.path}: e2e_latency must be a positive number of milliseconds") from None
    mode = "torch.compile" if match["fused"] else "eager"
    run = source.run(name, "import:neusight", _NOTES, match["model"], **_describe_conditions("2.1.0", mode))
    return Run(
        run,
        models=[
            _make_model_row(
                run, f"{match['model']}@{match['sequence']}", int(match["batch"]), latency, bool(match["fused"])
            )
        ],
    )


def _make_model_row(run: RunRow, model: str, batch: int, latency_ms: float, fused: bool) -> ModelRow:
    return ModelRow(
        run_id=run.run_id,
        model=model,
        device=run.device,
        batch=batch,
        latency_mean_ms=latency_ms,
        runtime=run.runtime,
        execution="fused" if fused else "eager",
        precision=run.precision,
    )


def _is_given(value: object) -> bool:
    return value is not None and value == value  # NaN: Parquet's value for a column of another op
