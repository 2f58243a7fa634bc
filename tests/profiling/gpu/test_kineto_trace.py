from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gpuprof.domain.gpu_description import GpuDescription
from gpuprof.errors import InputError
from gpuprof.profiling.gpu.kineto_trace import read_kineto
from tests.profiling.kineto_files import EPOCH_US, trace, trace_of_nodes, write


def test_kernels_carry_their_launch_their_operator_and_their_run(tmp_path: Path) -> None:
    timeline = read_kineto(write(tmp_path / "t.json", trace()))
    kernels = timeline.kernels
    assert kernels["name"].tolist() == ["warm", *["conv_kernel", "relu_kernel"] * 2]
    assert kernels["repeat"].tolist() == [-1, 0, 0, 1, 1]
    assert kernels["range"].tolist() == [None, "aten::conv2d", None, "aten::conv2d", None]
    assert kernels["grid_x"].tolist() == [216] * 5 and kernels["block_x"].tolist() == [128] * 5
    assert kernels["registers_per_thread"].tolist() == [64] * 5
    assert "achieved_occupancy_pct" not in kernels  # torch.profiler's own estimate is 0 above 48 KiB of shared memory
    assert timeline.gpus == {0: GpuDescription("NVIDIA A100-SXM4-80GB", "8.0", 108)}


def test_times_keep_their_nanoseconds_though_they_count_from_the_epoch(tmp_path: Path) -> None:
    kernels = read_kineto(write(tmp_path / "t.json", trace())).kernels
    assert kernels["start_ns"].tolist()[1] == (EPOCH_US + 1200) * 1000
    assert kernels["duration_ns"].tolist() == [40_125] * 5


def test_copies_have_their_direction_and_run(tmp_path: Path) -> None:
    copies = read_kineto(write(tmp_path / "t.json", trace())).copies
    assert sorted(zip(copies["repeat"], copies["direction"], copies["bytes"], strict=True)) == [
        (0, "d2h", 64),
        (0, "h2d", 4096),
        (1, "d2h", 64),
        (1, "h2d", 4096),
    ]


def test_a_compressed_trace_is_read_and_a_cut_one_refused(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps(trace()).encode())
    whole, cut = tmp_path / "t.json.gz", tmp_path / "c.json.gz"
    whole.write_bytes(packed)
    cut.write_bytes(packed[:-20])
    assert len(read_kineto(whole).kernels) == 5
    with pytest.raises(InputError, match="not a whole JSON file"):
        read_kineto(cut)


def test_a_trace_without_kernels_is_an_error_where_some_were_expected(tmp_path: Path) -> None:
    document = trace()
    document["traceEvents"] = [event for event in document["traceEvents"] if event.get("cat") != "kernel"]
    path = write(tmp_path / "t.json", document)
    with pytest.raises(InputError, match="has no kernel"):
        read_kineto(path)
    assert len(read_kineto(path, expect_kernels=False).kernels) == 0


@pytest.mark.parametrize("document", [[], {}, {"traceEvents": 5}, {"traceEvents": ["x"]}, [{"cat": "Node"}]])
def test_json_of_another_tool_is_refused(tmp_path: Path, document: object) -> None:
    with pytest.raises(InputError, match=r"not a trace of torch\.profiler"):
        read_kineto(write(tmp_path / "t.json", document))


def test_nodes_of_an_onnx_model_are_the_ranges_where_pytorch_ran_it(tmp_path: Path) -> None:
    timeline = read_kineto(write(tmp_path / "t.json", trace_of_nodes(["a", "b"], runs=2)))
    assert timeline.kernels["range"].tolist() == ["gpuprof-node:a", "gpuprof-node:b"] * 2
    assert timeline.repeats == 2
