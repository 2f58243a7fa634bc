from __future__ import annotations

from pathlib import Path

from gpuprof.profiling.gpu.gpu_rows import kernel_rows, op_rows
from gpuprof.profiling.gpu.kineto_trace import read_kineto
from tests.profiling.kineto_files import trace, trace_of_nodes, write
from tests.profiling.models import write_mlp
from tests.profiling.requests import a_request


def test_kernels_that_pytorch_launched_belong_to_the_node_whose_output_their_range_names(tmp_path: Path) -> None:
    request = a_request(write_mlp(tmp_path / "m.onnx"))
    ops = request.job.graph.ops
    outputs = [op.outputs[0].name for op in ops[1:]]  # the first launches nothing
    kernels = read_kineto(write(tmp_path / "t.json", trace_of_nodes(outputs, runs=4))).select_runs().kernels
    rows = op_rows(request, kernels)
    assert [row.name for row in rows] == [op.name for op in ops]
    assert [row.duration_p50_ns for row in rows] == [None, *[40_125] * len(outputs)]
    tied = {(row.op_name, row.op_signature) for row in kernel_rows(request, kernels)}
    assert tied == {(op.name, op.signature) for op in ops[1:]}


def test_kernels_within_ranges_that_name_no_node_give_no_times_of_ops(tmp_path: Path) -> None:
    request = a_request(write_mlp(tmp_path / "m.onnx"))
    kernels = read_kineto(write(tmp_path / "t.json", trace())).select_runs().kernels
    assert op_rows(request, kernels) == ()
    assert {row.op_name for row in kernel_rows(request, kernels)} == {"aten::conv2d", None}
