"""AIConfigurator's measurements: matrix products and attention as executed by TensorRT-LLM, vLLM and SGLang.

The files are ``systems/data/<gpu>/<kind>/<framework>/<version>/<kind>_perf.parquet`` of its repository, and tables with
the same columns that join several such files. A row is an op in a framework. The precision is that of the operands; for
attention, that of the arithmetic together with the key and value cache's.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from gpuprof.domain.catalogue import device_of_driver
from gpuprof.errors import InputError
from gpuprof.kernel_db.importers.published_op import describe_op, op_row
from gpuprof.kernel_db.importers.source import Source
from gpuprof.kernel_db.schema import PER_OP, OpRow, RunRow
from gpuprof.kernel_db.store import Run

LICENCE = "Apache-2.0, (c) NVIDIA CORPORATION & AFFILIATES"
_NOTES = f"ai-dynamo/aiconfigurator; {LICENCE}; kernels alone, without the host's launches"
_COMMON = {"framework", "version", "device", "op_name", "kernel_source"}
_KINDS = ("gemm", "context_attention", "generation_attention", "encoder_attention")
_TYPES = {"bfloat16": "bfloat16", "float16": "float16", "fp8": "float8e4m3fn", "fp8_block": "float8e4m3fn"}
_RUNTIMES = {"TRTLLM": "tensorrt-llm", "VLLM": "vllm", "SGLang": "sglang"}


def recognizes(source: Source) -> bool:
    """Return whether ``source`` is a Parquet file with the columns common to these tables."""
    return source.path.suffix == ".parquet" and set(source.columns()) >= _COMMON


def read_runs(source: Source, device: str | None) -> Iterable[Run]:
    """Return a run for each GPU, framework, version and precision of the file.

    Raises `InputError` for a GPU missing from the catalogue, an unknown kind of op or type, or an invalid number.
    """
    groups: dict[tuple[str, ...], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for line, row in enumerate(source.records(), 1):
        precision = str(row.get("gemm_dtype") or row.get("attn_dtype"))
        cache = str(row.get("kv_cache_dtype") or "")
        key = (
            str(row["device"]),
            str(row["framework"]),
            str(row["version"]),
            str(row["kernel_source"]),
            precision,
            cache,
        )
        groups[key].append((line, row))
    for (driver_name, framework, version, kernels, precision, cache), rows in groups.items():
        if precision not in _TYPES:
            raise InputError(f"{source.path}: type {precision!r} is none of {', '.join(_TYPES)}")
        catalogue_device = device_of_driver(driver_name)
        if catalogue_device is None and device is None:
            raise InputError(f"{source.path}: no GPU of the catalogue is called {driver_name!r}", "give --device")
        run = source.run(
            device or (catalogue_device.name if catalogue_device else ""),
            "import:aiconfigurator",
            _NOTES,
            PER_OP,
            runtime=_RUNTIMES.get(framework, framework.lower()),
            runtime_version=version,
            provider=kernels,
            precision=precision,
            settings=json.dumps({"kv_cache_dtype": cache}) if cache else None,
        )
        yield Run(run, ops=[_read_op(source, run, line, row, precision) for line, row in rows])


def _read_op(source: Source, run: RunRow, line: int, row: Mapping[str, Any], precision: str) -> OpRow:
    kind = str(row["op_name"])
    if kind not in _KINDS:
        raise InputError(f"{source.path}:{line}: op {kind!r} is none of {', '.join(_KINDS)}")
    sizes = _read_gemm(source, line, row) if kind == "gemm" else _read_attention(source, line, row, kind)
    op = describe_op("gemm" if kind == "gemm" else "attention", sizes, _TYPES[precision])
    latency = source.record_number(line, row, "latency_ms" if "latency_ms" in row else "latency")
    return op_row(run, op, sizes.get("b", 1), latency, "fused")


def _read_gemm(source: Source, line: int, row: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(source.record_number(line, row, name)) for name in "mnk"}


def _read_attention(source: Source, line: int, row: Mapping[str, Any], kind: str) -> dict[str, int]:
    """Return the sizes; in generation a single query attends to the keys of all earlier steps."""
    length = int(source.record_number(line, row, "isl"))
    heads = int(source.record_number(line, row, "num_heads"))
    generation = kind == "generation_attention"
    encoder = kind == "encoder_attention"
    return {
        "b": int(source.record_number(line, row, "batch_size")),
        "heads": heads,
        "key_heads": heads if encoder else int(source.record_number(line, row, "num_key_value_heads")),
        "queries": 1 if generation else length,
        "keys": length + int(source.record_number(line, row, "step")) if generation else length,
        "head_size": int(source.record_number(line, row, "head_dim")),
        "causal": int(kind == "context_attention"),
        # Empty column: measured without attention windows.
        "window": 0 if row.get("window_size") is None else int(source.record_number(line, row, "window_size")),
    }
