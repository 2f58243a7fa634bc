"""Reads tables of few rows without pyarrow's datasets: these import pandas, which takes longer than the reading.

No Python value is passed to pyarrow either: pyarrow would import pandas to check for pandas' own types.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpuprof.kernel_db.schema import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

#: Larger tables are read by datasets, in parallel and skipping row groups by their statistics.
_MOST_FILES, _MOST_ROWS = 32, 20_000


def read_few_files(
    table: str, files: Sequence[Path], columns: Sequence[str] | None, where: Mapping[str, object]
) -> pa.Table | None:
    """Return the rows of ``table`` in ``files``, in their order; None for many rows, or a file of an older version.

    ``columns``, ``where``: as for `gpuprof.kernel_db.store.KernelDb.read_table`. Raises pyarrow's own errors when a
    file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(table)
    chosen = schema.names if columns is None else list(columns)
    read = [name for name in schema.names if name in chosen or name in where]
    if len(files) > _MOST_FILES or not {*chosen, *where} <= set(schema.names):
        return None
    with ExitStack() as stack:
        opened = [stack.enter_context(pq.ParquetFile(one, page_checksum_verification=True)) for one in files]
        if any(not one.schema_arrow.equals(schema, check_metadata=True) for one in opened):
            return None
        if sum(one.metadata.num_rows for one in opened) > _MOST_ROWS:
            return None
        rows = pa.concat_tables([one.read(columns=read) for one in opened])
    for name, value in where.items():
        rows = rows.filter(_pack_bits([_is_asked_for(one, value) for one in rows.column(name).to_pylist()]))
    return rows.select(chosen).replace_schema_metadata(schema.metadata)


def _is_asked_for(value: object, wanted: object) -> bool:
    if isinstance(wanted, Collection) and not isinstance(wanted, str):
        return value in wanted
    return value == wanted


def _pack_bits(chosen: Sequence[bool]) -> pa.Array:
    """Return an Arrow array of bools without pandas' type check."""
    import pyarrow as pa

    packed = np.packbits(np.array(chosen, dtype=np.bool_), bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(chosen), [None, pa.py_buffer(packed)])
