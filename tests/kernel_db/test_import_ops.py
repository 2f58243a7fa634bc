"""Ops that others published come in with their sizes, kernels, precision and runtime."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuprof.errors import InputError
from gpuprof.kernel_db.importing import import_files, split_form
from gpuprof.kernel_db.store import KernelDb
from gpuprof.kernel_db.verification import verify

LAUNCH = {
    "device": "v100-pcie-32", "torch": "2.1.0", "kernel": "volta_sgemm_128x32_nn", "grid_x": 1, "grid_y": 1,
    "grid_z": 13, "block_x": 256, "block_y": 1, "block_z": 1,
}  # fmt: skip
BMM = {
    "op": "bmm",
    "latency_ms": 0.041258,
    **LAUNCH,
    "kernels": ";volta_sgemm_128x32_nn",
    "b": 13,
    "m": 27,
    "n": 15,
    "k": 29,
}
CONV = {
    "op": "conv", "latency_ms": 0.88, **LAUNCH, "kernels": ";first;second", "b": 38, "in_channels": 893,
    "out_channels": 326, "kernel_size": 3, "input_size": 5, "stride": 1, "padding": 1,
}  # fmt: skip
MODELS = (
    "device,model,sequence,batch,fused,latency_ms,neusight_ms\n"
    "t4,bert_large,512,8,False,694.46,\nt4,bert_large,512,8,True,600,1\n"
)
GEMM = {
    "framework": "TRTLLM",
    "version": "1.3.0rc20",
    "device": "NVIDIA L40S",
    "op_name": "gemm",
    "kernel_source": "torch_flow",
    "gemm_dtype": "fp8",
    "m": 3,
    "n": 5,
    "k": 7,
    "latency": 0.5,
}
GENERATION = {
    "framework": "VLLM",
    "version": "0.24.0",
    "device": "NVIDIA H100 80GB HBM3",
    "op_name": "generation_attention",
    "kernel_source": "vllm_flash_attn_fa3",
    "batch_size": 2,
    "isl": 1,
    "num_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "window_size": 0,
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "step": 1023,
    "latency": 0.01,
}


def _import(path: Path, name: str, content: str | dict[str, object]) -> KernelDb:
    if isinstance(content, str):
        (path / name).write_text(content)
    else:
        pq.write_table(pa.Table.from_pylist([content]), path / name)
    database = KernelDb.create(path / "db")
    import_files(database, [path / name])
    assert verify(database) == []
    return database


def test_a_product_of_neusight_has_its_shapes_time_and_launch(tmp_path: Path) -> None:
    database = _import(tmp_path, "ops.parquet", BMM)
    (op,) = database.read_table("ops").to_pylist()
    assert (op["op_type"], op["shapes"], op["device"]) == ("MatMul", "13x27x29,13x29x15->13x27x15", "v100-pcie-32")
    assert (op["duration_mean_ns"], op["flops"]) == (41258, 2 * 13 * 27 * 15 * 29)
    (kernel,) = database.read_table("kernels").to_pylist()
    assert (kernel["name"], kernel["grid_z"], kernel["block_x"]) == ("volta_sgemm_128x32_nn", 13, 256)
    assert kernel["op_signature"] == op["signature"]
    (run,) = database.read_table("runs").to_pylist()
    assert (run["runtime"], run["precision"], run["runtime_version"]) == ("pytorch", "float32", "2.1.0")
    assert "MIT" in run["notes"]


def test_a_convolution_of_several_kernels_says_so(tmp_path: Path) -> None:
    (op,) = _import(tmp_path, "ops.parquet", CONV).read_table("ops").to_pylist()
    assert op["shapes"] == "38x893x5x5,326x893x3x3->38x326x5x5"
    assert op["note"] == "2 kernels: first; second"


def test_whole_models_are_apart_by_runtime(tmp_path: Path) -> None:
    database = _import(tmp_path, "models.csv", MODELS)
    runs = {row["run_id"]: row["provider"] for row in database.read_table("runs").to_pylist()}
    latencies = {runs[row["run_id"]]: row["latency_mean_ms"] for row in database.read_table("models").to_pylist()}
    assert latencies == {"cuda, eager": 694.46, "cuda, torch.compile": 600.0}


def test_of_a_file_with_several_gpus_each_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "models.csv").write_text(f"{MODELS}v100-pcie-32,bert_large,512,8,False,257.1,\n")
    (imported,) = import_files(KernelDb.create(tmp_path / "db"), [tmp_path / "models.csv"])
    assert (imported.device, imported.rows) == ("t4, v100-pcie-32", 3)


def test_products_of_aiconfigurator_have_their_precision_and_framework(tmp_path: Path) -> None:
    database = _import(tmp_path, "gemm_perf.parquet", GEMM)
    (run,) = database.read_table("runs").to_pylist()
    assert (run["device"], run["runtime"], run["precision"]) == ("l40s", "tensorrt-llm", "fp8")
    (op,) = database.read_table("ops").to_pylist()
    assert (op["shapes"], op["dtype"], op["duration_mean_ns"]) == ("3x7,7x5->3x5", "float8e4m3fn", 500_000)


@pytest.mark.parametrize("window", [0, None])
def test_a_generated_token_meets_the_keys_of_all_steps_before(tmp_path: Path, window: int | None) -> None:
    row = GENERATION | {"window_size": window}
    (op,) = _import(tmp_path, "generation.parquet", row).read_table("ops").to_pylist()
    assert op["shapes"] == "2x8x1x64,2x4x1024x64,2x4x1024x64->2x8x1x64"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GEMM | {"device": "NVIDIA Frobnicator"}, "no GPU of the catalogue is called 'NVIDIA Frobnicator'"),
        (GEMM | {"gemm_dtype": "ternary"}, "type 'ternary' is none of bfloat16"),
        (GEMM | {"op_name": "moe"}, "op 'moe' is none of gemm"),
        (GEMM | {"latency": -1.0}, "latency must be a number, not negative, but is -1.0"),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path: Path, content: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _import(tmp_path, "gemm_perf.parquet", content)


def test_a_damaged_parquet_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "ops.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InputError, match="not a whole Parquet file"):
        import_files(KernelDb.create(tmp_path / "db"), [tmp_path / "ops.parquet"])


def test_a_form_may_be_named_before_the_files() -> None:
    assert split_form([Path("neusight"), Path("a.csv")]) == ("neusight", [Path("a.csv")])
    assert split_form([Path("a.csv")]) == (None, [Path("a.csv")])
