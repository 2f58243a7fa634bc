from pathlib import Path

from bench.gpu.kernel_order import executed_order, tie_run
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import KernelRow
from tests.small_models import floats, write_text

#: As launched for `_network` on an H200: layout, product and bias of the convolution; ReLU; product and its sum.
LAUNCHED = (
    "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float>",
    "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw",
    "void op_generic_tensor_kernel<4, float, float, float, 256>",
    "void onnxruntime::cuda::_UnaryElementWise<float, float, onnxruntime::cuda::OP_Relu<float>>",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_nn_align4>",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
)


def _network(path: Path) -> Path:
    text = """(float[N,3,2,2] x) => (float[N,4] y) { [first] c = Conv (x, w, b) [second] r = Relu (c)
        [third] f = Flatten (r) [fourth] y = Gemm (f, v) }"""
    return write_text(path, text, {"w": floats(2, 3, 1, 1), "b": floats(2), "v": floats(8, 4)})


def _kernels(*names: str) -> list[KernelRow]:
    return [KernelRow("r", "m", "h200", 1, name, position) for position, name in enumerate(names)]


def test_kernels_belong_to_the_nodes_in_whose_order_they_come(tmp_path: Path) -> None:
    path = _network(tmp_path / "m.onnx")
    tied = tie_run(_kernels(*LAUNCHED), executed_order(path), load_graph(path, 1))
    assert tied is not None
    assert [kernel.op_name for kernel in tied] == ["first"] * 3 + ["second"] + ["fourth"] * 2
    assert tied[0].op_signature == load_graph(path, 1).ops[0].signature


def test_nothing_is_tied_where_order_and_names_do_not_decide(tmp_path: Path) -> None:
    path = _network(tmp_path / "m.onnx")
    graph, executed = load_graph(path, 1), executed_order(path)
    assert tie_run(_kernels(*LAUNCHED, "a_kernel_of_unknown_origin"), executed, graph) is None
    assert tie_run(_kernels(*LAUNCHED[:4]), executed, graph) is None
    assert tie_run(_kernels(LAUNCHED[3], *LAUNCHED[:3], *LAUNCHED[4:]), executed, graph) is None
