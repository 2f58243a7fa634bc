"""Brings tables that an older gpuprof wrote up to the present schema; the files themselves stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import SCHEMA_VERSION, VERSION_KEY, arrow_schema

if TYPE_CHECKING:  # imported on use: not needed without a database
    import pyarrow as pa

#: Version → table → old name of a column → its name in the next version. Columns that a version merely added
#: need no entry: in older rows they are null.
RENAMED: Mapping[int, Mapping[str, Mapping[str, str]]] = {
    1: {"kernels": {"stream": "stream_id", "instructions": "instruction_count"}}
}


#: First version whose rows name their runtime, execution and precision.
_SAYS_VARIANT = 3
#: First version with a separate column for estimated occupancies.
_PARTS_ESTIMATES = 5
_VARIANT = ("runtime", "execution", "precision")
_EXECUTIONS = {"onnxruntime": ("onnxruntime", "fused"), "torch": ("pytorch", "eager")}
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def version_of(schema: pa.Schema, path: str) -> int:
    """Return the schema version of the file at ``path``.

    Raises `InputError` when the file is not gpuprof's, or of a newer gpuprof.
    """
    try:
        version = int((schema.metadata or {})[VERSION_KEY])
    except (KeyError, ValueError):
        raise InputError(f"{path} was not written by gpuprof", "move it out of the kernel database") from None
    if not 1 <= version <= SCHEMA_VERSION:
        raise InputError(
            f"{path} has version {version} of the schema, this gpuprof reads up to {SCHEMA_VERSION}", "upgrade gpuprof"
        )
    return version


def migrate_table(table: str, old: pa.Table, path: str) -> pa.Table:
    """Return the rows of ``old``, of any older version, with the present schema of ``table``."""
    import pyarrow as pa

    oldest = version_of(old.schema, path)
    for version in range(oldest, SCHEMA_VERSION):
        renames = RENAMED.get(version, {}).get(table, {})
        old = old.rename_columns([renames.get(name, name) for name in old.column_names])
    schema = arrow_schema(table)
    # The run already had these columns; only its other rows lacked them.
    if oldest < _SAYS_VARIANT and table != "runs" and set(_VARIANT) <= set(schema.names):
        old = _with_variants(old, Path(path).parent / "runs.parquet")
    if oldest < _PARTS_ESTIMATES and table == "kernels" and "launch_occupancy_pct" not in old.column_names:
        old = _part_estimates(old)
    columns = [
        old.column(field.name).cast(field.type) if field.name in old.column_names else pa.nulls(len(old), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _part_estimates(kernels: pa.Table) -> pa.Table:
    """Move occupancies estimated from launches, as older versions stored them, out of the column of counters.

    Estimates belong to kernels with a start time (from a timeline) and without counters.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if "achieved_occupancy_pct" not in kernels.column_names:
        return kernels
    count = kernels.num_rows
    joined = kernels.column("joined") if "joined" in kernels.column_names else pa.nulls(count, pa.string())
    starts = kernels.column("start_ns") if "start_ns" in kernels.column_names else pa.nulls(count, pa.int64())
    has_counters = pc.is_in(joined, value_set=pa.array(["both", "counters"]))
    estimated = pc.and_(pc.invert(has_counters), pc.is_valid(starts))
    mixed, nulls = kernels.column("achieved_occupancy_pct"), pa.nulls(count, pa.float64())
    position = kernels.column_names.index("achieved_occupancy_pct")
    kernels = kernels.set_column(position, "achieved_occupancy_pct", pc.if_else(estimated, nulls, mixed))
    return kernels.append_column("launch_occupancy_pct", pc.if_else(estimated, mixed, nulls))


def _with_variants(rows: pa.Table, runs: Path) -> pa.Table:
    """Add the runtime, execution and precision of their segment's runs to old rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not runs.is_file() or "run_id" not in rows.column_names:
        return rows
    variants_by_run = {run["run_id"]: _variant_of_run(run) for run in pq.read_table(runs).to_pylist()}
    variants = [variants_by_run.get(run_id, (None, None, None)) for run_id in rows.column("run_id").to_pylist()]
    for position, name in enumerate(_VARIANT):
        if name not in rows.column_names:
            rows = rows.append_column(name, pa.array([variant[position] for variant in variants], pa.string()))
    return rows


def _variant_of_run(run: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
    """Return runtime, execution and precision; on GPUs older runs left the precision to the runtime's defaults."""
    runtime, execution = _EXECUTIONS.get(run.get("runtime") or "", (None, None))
    on_cpu = "CPU" in (run.get("provider") or "")
    precision_text = run.get("precision")  # type of the first input; whole numbers for a language model
    precision = (precision_text if precision_text in _FLOATS else "float32") if runtime is not None and on_cpu else None
    return runtime, execution, precision
