"""Which kernels a graph becomes: views none, linear layers one, chains one where a runtime fuses."""

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.estimators.cross_gpu.features import FAMILIES
from gpuprof.estimators.cross_gpu.kernels import (
    BIAS_OF_CONVOLUTION,
    LAYOUT_OF_CONVOLUTION,
    KernelsByBatch,
    LaunchMode,
    batch_seconds,
    copy_seconds,
    host_seconds,
    list_kernels,
)
from gpuprof.graph.load import load_graph
from gpuprof.graph.op_costs import cost_of
from tests.small_models import write_model


def _op(
    op_type: str, inputs: list[Tensor], output: Tensor, weights: list[Tensor] | None = None, **attributes: object
) -> Op:
    cost = cost_of(op_type, "", inputs, [output], attributes)
    made = (output,)
    return Op(
        output.name, op_type, "", tuple(inputs), made, tuple(weights or ()), attributes,
        cost.flops, cost.bytes_read, cost.bytes_written,
    )  # fmt: skip


def _graph(*ops: Op) -> ModelGraph:
    first = ops[0].inputs[0]
    weights = tuple(weight for op in ops for weight in op.weights)
    return ModelGraph("test", 1, ops, (first,), ops[-1].outputs, weights, 17, "", "")


def _t(name: str, *shape: int) -> Tensor:
    return Tensor(name, "float32", shape)


X, W, BIAS, H = _t("x", 8, 16, 32), _t("w", 32, 64), _t("bias", 64), _t("h", 8, 16, 64)
LINEAR = (_op("MatMul", [X, W], H, [W]), _op("Add", [H, BIAS], _t("hb", 8, 16, 64), [BIAS]))
RELU = _op("Relu", [_t("hb", 8, 16, 64)], _t("y", 8, 16, 64))


def test_a_linear_layer_with_its_bias_is_one_product_of_all_rows() -> None:
    kernels = list_kernels(_graph(*LINEAR), "float32", LaunchMode.EAGER)
    assert kernels.op_types == ("MatMul",)
    ops = kernels.ops
    assert (ops.b[0], ops.m[0], ops.n[0], ops.k[0]) == (1, 128, 64, 32)
    assert ops.flops[0] == 2 * 128 * 64 * 32


def test_an_activation_is_a_kernel_of_its_own_only_where_nothing_is_fused() -> None:
    graph = _graph(*LINEAR, RELU)
    assert list_kernels(graph, "float32", LaunchMode.EAGER).op_types == ("MatMul", "Relu")
    assert list_kernels(graph, "float32", LaunchMode.FUSED).op_types == ("MatMul",)


def _project_thrice() -> ModelGraph:
    made = [_t(name, 8, 16, 64) for name in "qkv"]
    weights = [_t(f"w{name}", 32, 64) for name in "qkv"]
    products = [_op("MatMul", [X, weight], out, [weight]) for weight, out in zip(weights, made, strict=True)]
    biased = [_op("Add", [out, BIAS], _t(f"b{out.name}", 8, 16, 64), [BIAS]) for out in made]
    return _graph(*products, *biased)


def test_linear_layers_that_read_the_same_are_one_product_where_half_precision_is_fused() -> None:
    whole = list_kernels(_project_thrice(), "float16", LaunchMode.FUSED).ops
    assert (whole.m[0], whole.n[0], whole.k[0]) == (128, 3 * 64, 32)
    parts = list_kernels(_project_thrice(), "float16", LaunchMode.EAGER).ops
    assert len(whole) == 1 and len(parts) == 3
    assert whole.flops.sum() == parts.flops.sum()
    assert whole.written_bytes.sum() == parts.written_bytes.sum()
    # What they share is read once, and so is their one bias here.
    assert whole.read_bytes.sum() == parts.read_bytes.sum() - 2 * (2 * X.elements + 2 * BIAS.elements)
    assert len(list_kernels(_project_thrice(), "float32", LaunchMode.FUSED).ops) == 3


def _gelu(x: Tensor, *, half_first: bool = False) -> list[Op]:
    """Return Div, Erf, Add, Mul and Mul; as PyTorch's exporter writes it, with the half before the input."""
    root, unit, half = _t("root"), _t("one"), _t("half")
    d, e, a, m, y = (_t(name, 8, 16, 64) for name in "deamy")
    halved = [_op("Mul", [half, a], m, [half]), _op("Mul", [x, m], y)]
    scaled = [_op("Mul", [x, a], m), _op("Mul", [m, half], y, [half])]
    start = [_op("Div", [x, root], d, [root]), _op("Erf", [d], e), _op("Add", [e, unit], a, [unit])]
    return [*start, *(halved if half_first else scaled)]


def test_a_gelu_is_the_end_of_its_linear_layer_where_half_precision_is_fused() -> None:
    graph = _graph(*LINEAR, *_gelu(_t("hb", 8, 16, 64)))
    assert list_kernels(graph, "float16", LaunchMode.FUSED).op_types == ("MatMul",)
    assert len(list_kernels(graph, "float16", LaunchMode.EAGER).op_types) == 2
    assert len(list_kernels(graph, "float32", LaunchMode.FUSED).op_types) == 2


def test_a_product_of_two_activations_is_a_batch_of_products() -> None:
    left, right = _t("l", 2, 4, 16, 8), _t("r", 2, 4, 8, 32)
    kernels = list_kernels(_graph(_op("MatMul", [left, right], _t("s", 2, 4, 16, 32))), "float32", LaunchMode.EAGER)
    ops = kernels.ops
    assert (ops.b[0], ops.m[0], ops.n[0], ops.k[0]) == (8, 16, 32, 8)


def test_views_and_transposed_operands_cost_nothing() -> None:
    query, key = _t("q", 4, 16, 8), _t("k", 4, 16, 8)
    turned = _t("kt", 4, 8, 16)
    flat = _op("Reshape", [X], _t("q", 4, 16, 8))
    swap = _op("Transpose", [key], turned, perm=(0, 2, 1))
    kernels = list_kernels(
        _graph(flat, swap, _op("MatMul", [query, turned], _t("s", 4, 16, 16))), "float32", LaunchMode.EAGER
    )
    assert kernels.op_types == ("MatMul",)


def _attention(tokens: int = 128) -> ModelGraph:
    query, key, value = _t("q", 2, 4, tokens, 64), _t("k", 2, 4, 64, tokens), _t("v", 2, 4, tokens, 64)
    scores, scaled, soft = (_t(name, 2, 4, tokens, tokens) for name in ("s", "ss", "p"))
    return _graph(
        _op("MatMul", [query, key], scores),
        _op("Mul", [scores, _t("scale")], scaled, [_t("scale")]),
        _op("Softmax", [scaled], soft, axis=-1),
        _op("MatMul", [soft, value], _t("o", 2, 4, tokens, 64)),
    )


@pytest.mark.parametrize("runtime", [mode for mode in LaunchMode if mode.fuses_attention])
def test_attention_is_one_kernel_where_the_runtime_fuses_it_and_the_type_has_one(runtime: LaunchMode) -> None:
    assert len(list_kernels(_attention(), "float32", LaunchMode.EAGER_FUSED).ops) == 4
    fused = list_kernels(_attention(), "float16", runtime).ops
    assert [FAMILIES[family] for family in fused.family] == ["attention"]
    assert (fused.b[0], fused.m[0], fused.n[0], fused.k[0]) == (8, 128, 128, 64)


def test_other_runtimes_launch_attention_as_the_file_writes_it() -> None:
    for runtime, kernels in ((LaunchMode.ONNXRUNTIME, 3), (LaunchMode.EAGER, 4), (LaunchMode.TENSORRT, 3)):
        families = [FAMILIES[family] for family in list_kernels(_attention(), "float16", runtime).ops.family]
        assert len(families) == kernels and families.count("matmul") == 2 and families.count("softmax") == 1


def test_onnxruntimes_attention_adds_the_biases_of_one_joint_product() -> None:
    x, flat, heads = _t("x", 2, 128, 256), _t("f", 2, 128, 4, 64), (2, 4, 128, 64)
    ops = []
    for name in "qkv":
        weight, bias = _t(f"w{name}", 256, 256), _t(f"b{name}", 256)
        product, linear = _t(f"p{name}", 2, 128, 256), _t(f"l{name}", 2, 128, 256)
        apart = _t(f"r{name}", *flat.shape)
        ops += [
            _op("MatMul", [x, weight], product, [weight]),
            _op("Add", [bias, product], linear, [bias]),
            _op("Reshape", [linear], apart),
            _op("Transpose", [apart], _t(name, *heads) if name != "k" else _t("k", 2, 4, 64, 128)),
        ]
    graph = _graph(*ops, *_attention().ops)
    kernels = list_kernels(graph, "float16", LaunchMode.ONNXRUNTIME_FUSED).ops
    assert [FAMILIES[family] for family in kernels.family] == ["matmul", "attention"]
    assert kernels.n[0] == 3 * 256


def test_tensorrt_keeps_tensors_in_8_bits_between_products_in_8_bits() -> None:
    normalised = _op("LayerNormalization", [_t("x", 8, 16, 64)], _t("y", 8, 16, 64))
    width = {
        (runtime, precision): list_kernels(_graph(normalised), precision, runtime).ops.written_bytes[0] / (8 * 16 * 64)
        for runtime in (LaunchMode.TENSORRT, LaunchMode.ONNXRUNTIME)
        for precision in ("float16", "int8")
    }
    assert list(width.values()) == [2.0, 1.0, 2.0, 2.0]


def test_heads_before_tokens_are_copied_in_half_precision() -> None:
    tokens, heads = _t("x", 2, 128, 4, 64), _t("h", 2, 4, 128, 64)
    moved = _op("Transpose", [tokens], heads, perm=(0, 2, 1, 3))
    swapped = _op("Transpose", [_t("k", 2, 4, 128, 64)], _t("t", 2, 4, 64, 128), perm=(0, 1, 3, 2))
    product = _op("MatMul", [heads, _t("t", 2, 4, 64, 128)], _t("y", 2, 4, 128, 128))
    for runtime in (LaunchMode.ONNXRUNTIME, LaunchMode.TENSORRT):
        kinds = {
            precision: list_kernels(_graph(moved, swapped, product), precision, runtime).op_types
            for precision in ("float16", "float32")
        }
        assert kinds == {"float16": ("Transpose", "MatMul"), "float32": ("MatMul",)}


def test_compilers_compute_indices_in_the_kernels_that_read_them() -> None:
    words, places = Tensor("words", "int64", (8, 128)), Tensor("places", "int64", (8, 128))
    table, rows = _t("table", 1000, 64), _t("rows", 8, 128, 64)
    shifted = _op("Add", [words, words], places)
    looked_up = _op("Gather", [table, places], rows, [table])
    for runtime, kinds in (
        (LaunchMode.TENSORRT, ("Gather",)),
        (LaunchMode.FUSED, ("Gather",)),
        (LaunchMode.ONNXRUNTIME, ("Add", "Gather")),
        (LaunchMode.EAGER, ("Add", "Gather")),
    ):
        assert list_kernels(_graph(shifted, looked_up), "float16", runtime).op_types == kinds
        assert list_kernels(_graph(shifted), "float16", runtime).op_types == ("Add",)  # an output is written


def test_a_part_of_a_tensor_is_a_view_in_pytorch_and_joined_parts_are_activated_as_they_are_written() -> None:
    image, part = _t("x", 8, 64, 16, 16), _t("part", 8, 32, 16, 16)
    sliced = _op("Slice", [image], part)
    joined = _op("Concat", [part, part], _t("both", 8, 64, 16, 16))
    activated = _op("Relu", [_t("both", 8, 64, 16, 16)], _t("y", 8, 64, 16, 16))
    for runtime, kinds in (
        (LaunchMode.FUSED, ("Concat",)),
        (LaunchMode.EAGER, ("Concat", "Relu")),
        (LaunchMode.TENSORRT, ("Slice", "Concat")),
        (LaunchMode.ONNXRUNTIME, ("Slice", "Concat", "Relu")),
    ):
        assert list_kernels(_graph(sliced, joined, activated), "float16", runtime).op_types == kinds


def test_a_block_of_tensorrts_attention_has_all_queries_of_a_head_in_sequences_of_its_plugins() -> None:
    for runtime, queries, row in (
        (LaunchMode.TENSORRT_FUSED, 384, 384.0),
        (LaunchMode.TENSORRT_FUSED, 1024, 1.0),
        (LaunchMode.FUSED, 384, 1.0),
    ):
        assert list_kernels(_attention(queries), "float16", runtime).ops.row.tolist() == [row]


def test_what_onnxruntime_repeats_along_a_dimension_waits_for_its_sms_in_half_precision() -> None:
    scores, mask = _t("s", 2, 4, 128, 128), _t("m", 2, 1, 1, 128)
    masked = _op("Add", [scores, mask], _t("y", 2, 4, 128, 128))
    plain = _op("Add", [scores, _t("z", 2, 4, 128, 128)], _t("y", 2, 4, 128, 128))
    repeated, same = (
        list_kernels(_graph(masking), "float16", LaunchMode.ONNXRUNTIME).ops for masking in (masked, plain)
    )
    assert repeated.flops[0] > 2.0 * same.flops[0]
    by_tensorrt = list_kernels(_graph(masked), "float16", LaunchMode.TENSORRT).ops
    assert by_tensorrt.flops[0] == same.flops[0]


def test_products_in_8_bits_quantise_nothing_again() -> None:
    weight = _t("w", 64, 64)
    product = _op("MatMul", [_t("x", 8, 64), weight], _t("y", 8, 64), [weight])
    ops = list_kernels(_graph(product), "int8", LaunchMode.TENSORRT).ops
    assert ops.width[0] == 2.0 and ops.read_bytes[0] == 8 * 64 + 64 * 64


def test_a_convolution_is_the_product_that_it_is() -> None:
    image, weight, out = _t("i", 2, 3, 32, 32), _t("w", 16, 3, 3, 3), _t("o", 2, 16, 16, 16)
    conv = _op("Conv", [image, weight], out, [weight], strides=(2, 2), kernel_shape=(3, 3), pads=(1, 1, 1, 1), group=1)
    ops = list_kernels(_graph(conv), "float32", LaunchMode.EAGER).ops
    assert (ops.m[0], ops.n[0], ops.k[0]) == (2 * 16 * 16, 16, 27)
    assert np.isclose(ops.flops[0], conv.flops or 0)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("runtime", list(LaunchMode))
def test_a_gelu_written_as_div_erf_add_mul_mul_is_one_kernel_in_any_runtime(runtime: LaunchMode) -> None:
    kernels = list_kernels(_graph(*LINEAR, *_gelu(_t("hb", 8, 16, 64))), "float32", runtime)
    assert kernels.op_types == ("MatMul", "Mul")  # ONNX Runtime's GELU adds the bias


def test_a_gelu_whose_half_comes_before_its_input_is_five_kernels_in_onnx_runtime() -> None:
    """As ONNX Runtime ran BERT's on an H200."""
    graph = _graph(*_gelu(_t("x", 8, 16, 64), half_first=True))
    written = ("Div", "Erf", "Add", "Mul", "Mul")
    assert list_kernels(graph, "float32", LaunchMode.ONNXRUNTIME).op_types == written
    assert list_kernels(graph, "float32", LaunchMode.EAGER).op_types == ("Mul",)


def test_onnx_runtime_adds_the_bias_of_a_convolution_by_a_kernel_of_its_own() -> None:
    weight, bias, image, out = _t("w", 8, 4, 3, 3), _t("b", 8), _t("x", 2, 4, 16, 16), _t("c", 2, 8, 16, 16)
    plain = _graph(_op("Conv", [image, weight], out, [weight]))
    biased = _graph(_op("Conv", [image, weight, bias], out, [weight, bias]))
    scale = [_t(name, 8) for name in ("s", "o", "mean", "var")]
    normalised = _graph(
        _op("Conv", [image, weight], out, [weight]),
        _op("BatchNormalization", [out, *scale], _t("n", 2, 8, 16, 16), scale),
    )
    first = {
        name: list_kernels(graph, "float32", LaunchMode.ONNXRUNTIME)
        for name, graph in (("plain", plain), ("biased", biased), ("normalised", normalised))
    }
    assert first["plain"].op_types == ("Conv",)
    assert first["biased"].op_types == first["normalised"].op_types == ("Conv", BIAS_OF_CONVOLUTION)
    assert list_kernels(biased, "float32", LaunchMode.EAGER).op_types == ("Conv",)
    # Layouts change in TF32 around windows, and not around products of matrices.
    assert list_kernels(biased, "tfloat32", LaunchMode.ONNXRUNTIME).op_types == (
        "Conv",
        *2 * (LAYOUT_OF_CONVOLUTION,),
        BIAS_OF_CONVOLUTION,
    )
    point = _t("p", 8, 4, 1, 1)
    pointwise = _graph(_op("Conv", [image, point, bias], out, [point, bias]))
    assert list_kernels(pointwise, "tfloat32", LaunchMode.ONNXRUNTIME).op_types == ("Conv", BIAS_OF_CONVOLUTION)


def test_onnx_runtime_adds_a_residual_and_its_bias_within_the_normalisation_behind_them() -> None:
    weight, bias, scale = _t("w", 64, 64), _t("b", 64), _t("s", 64)
    x, h, hb, r, y = (_t(name, 8, 64) for name in ("x", "h", "hb", "r", "y"))
    graph = _graph(
        _op("MatMul", [x, weight], h, [weight]),
        _op("Add", [h, bias], hb, [bias]),
        _op("Add", [hb, x], r),
        _op("LayerNormalization", [r, scale], y, [scale]),
    )
    assert list_kernels(graph, "float32", LaunchMode.ONNXRUNTIME).op_types == ("MatMul", "LayerNormalization")


@pytest.mark.parametrize("runtime", list(LaunchMode))
def test_an_op_that_takes_nothing_is_a_kernel_in_any_runtime(runtime: LaunchMode) -> None:
    noise, out = _t("r", 8, 64), _t("y", 8, 64)
    graph = _graph(_op("Add", [X, noise], out), Op("r", "RandomNormal", "", (), (noise,), (), {}, None, 0, 2048))
    assert set(list_kernels(graph, "float32", runtime).op_types) == {"Add", "RandomNormal"}


def test_onnx_runtime_copies_inputs_and_outputs_in_proportion_to_the_batch(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": ["N", 1000]}, {"y": None})
    by_batch = KernelsByBatch(lambda batch: load_graph(path, batch), "float32", LaunchMode.ONNXRUNTIME)
    for batch in (1, 3, 100):
        kernels = by_batch.at(batch)
        assert kernels.input_bytes == kernels.output_bytes == 4000.0 * batch
        assert copy_seconds(kernels, LaunchMode.ONNXRUNTIME) == pytest.approx(4000.0 * batch * (1 / 8.1e9 + 1 / 15e9))
        assert copy_seconds(kernels, LaunchMode.EAGER) == copy_seconds(kernels, LaunchMode.FUSED) == 0.0


def test_torchscript_launches_the_kernels_of_eager_execution_in_half_the_time() -> None:
    tensors = [_t(name, 2, 16) for name in "abc"]
    graph = _graph(*LINEAR, *(_op("Relu", [tensors[n]], tensors[n + 1]) for n in range(2)))
    eager, script = (list_kernels(graph, "float32", LaunchMode(name)) for name in ("pytorch-eager", "pytorch-script"))
    assert (script.op_types, script.count) == (eager.op_types, eager.count)
    assert host_seconds(script, LaunchMode.SCRIPT) == pytest.approx(host_seconds(eager, LaunchMode.EAGER) / 2.0)


@pytest.mark.parametrize("runtime", [LaunchMode.EAGER, LaunchMode.ONNXRUNTIME, LaunchMode.TENSORRT])
def test_the_host_takes_as_long_for_every_launch(runtime: LaunchMode) -> None:
    image, weight, out = _t("i", 2, 3, 32, 32), _t("w", 16, 3, 3, 3), _t("o", 2, 16, 16, 16)
    conv = _op("Conv", [image, weight], out, [weight], strides=(2, 2), kernel_shape=(3, 3), pads=(1, 1, 1, 1), group=1)
    relu = _op("Relu", [out], _t("z", 2, 16, 16, 16))
    kernels = list_kernels(_graph(conv, relu), "float32", runtime)
    assert host_seconds(kernels, runtime, 10.0) == pytest.approx(10e-6 * sum(kernels.count))


def test_neither_the_host_nor_the_kernels_are_hidden_where_both_take_as_long_in_onnx_runtime() -> None:
    kernels = list_kernels(_graph(*LINEAR), "float32", LaunchMode.ONNXRUNTIME)
    copied = copy_seconds(kernels, LaunchMode.ONNXRUNTIME)
    assert batch_seconds(3e-3, 4e-3, kernels, LaunchMode.ONNXRUNTIME) == pytest.approx(5e-3 + copied)
    assert batch_seconds(0.0, 4e-3, kernels, LaunchMode.ONNXRUNTIME) == pytest.approx(4e-3 + copied)
    assert [batch_seconds(kernels_s, 4e-3, kernels, LaunchMode.FUSED) for kernels_s in (3e-3, 9e-3)] == [4e-3, 9e-3]


def test_the_runtimes_own_attention_is_the_projection_of_its_input_and_an_attention() -> None:
    x, w, bias = _t("x", 2, 12, 16), _t("w", 16, 48), _t("b", 48)
    op = _op("Attention", [x, w, bias], _t("y", 2, 12, 16), [w, bias], num_heads=2)
    ops = list_kernels(_graph(op), "float32", LaunchMode.EAGER).ops
    assert (ops.b[0], ops.m[0], ops.n[0], ops.k[0]) == (1, 24, 48, 16)
    assert (ops.b[1], ops.m[1], ops.n[1], ops.k[1]) == (4, 12, 12, 8)
    assert ops.flops[1] == 4 * 4 * 8 * 12 * 12


def test_a_chain_of_thousands_of_ops_is_more_than_one_kernel_and_far_fewer_than_its_ops() -> None:
    chain = [_op("Relu", [_t(f"t{step}", 8, 16)], _t(f"t{step + 1}", 8, 16)) for step in range(5000)]
    kernels = list_kernels(_graph(*chain), "float32", LaunchMode.FUSED)
    assert set(kernels.op_types) == {"Relu"} and len(kernels.op_types) == -(-5000 // 64)
    assert set(kernels.ops.read_bytes) == set(kernels.ops.written_bytes) == {8 * 16 * 4.0}
    assert len(list_kernels(_graph(*chain), "float32", LaunchMode.EAGER).op_types) == 5000


IMAGE, TAPS, MADE = _t("image", 4, 64, 28, 28), _t("taps", 128, 64, 3, 3), _t("made", 4, 128, 28, 28)
CONVOLUTION = _op("Conv", [IMAGE, TAPS], MADE, [TAPS], kernel_shape=(3, 3), pads=(1, 1, 1, 1))
ELEMENTS, WEIGHTS = 4 * (64 + 128) * 28 * 28, 128 * 64 * 9


@pytest.mark.parametrize(
    ("precision", "runtime", "traffic"),
    [
        ("float32", LaunchMode.EAGER, 4 * ELEMENTS + 4 * WEIGHTS),
        ("tfloat32", LaunchMode.EAGER, 3 * 4 * ELEMENTS + 4 * WEIGHTS),
        ("tfloat32", LaunchMode.FUSED, 4 * ELEMENTS + 4 * WEIGHTS),
        ("float16", LaunchMode.EAGER, 2 * ELEMENTS + 2 * WEIGHTS),
        ("float16", LaunchMode.FUSED, 2 * ELEMENTS + 2 * WEIGHTS),
        ("float8", LaunchMode.FUSED, 2 * ELEMENTS + WEIGHTS),
        ("int8", LaunchMode.FUSED, ELEMENTS + WEIGHTS),
    ],
)
def test_images_are_put_in_order_for_tensor_cores_in_tf32(precision: str, runtime: LaunchMode, traffic: float) -> None:
    ops = list_kernels(_graph(CONVOLUTION), precision, runtime).ops
    assert ops.bytes_moved.sum() == traffic


def test_an_activation_times_its_own_sigmoid_is_one_kernel_in_either_runtime() -> None:
    gate, swish = _t("gate", 4, 128, 28, 28), _t("swish", 4, 128, 28, 28)
    graph = _graph(CONVOLUTION, _op("Sigmoid", [MADE], gate), _op("Mul", [MADE, gate], swish))
    assert list_kernels(graph, "float16", LaunchMode.EAGER).op_types == ("Conv", "Mul")
    scaled = _graph(CONVOLUTION, _op("Sigmoid", [_t("other", 4, 128, 28, 28)], gate), _op("Mul", [MADE, gate], swish))
    assert list_kernels(scaled, "float16", LaunchMode.EAGER).op_types == ("Conv", "Sigmoid", "Mul")


def _attention_of_one_projection(*, kept: bool = False) -> ModelGraph:
    """Return queries, keys and values cut from one tensor, as timm's networks are exported."""
    packed, turned = _t("packed", 8, 197, 3, 12, 64), _t("turned", 3, 8, 12, 197, 64)
    parts = [_t(name, 8, 12, 197, 64) for name in "qkv"]
    scale, scaled, keys = _t("scale", 1), _t("qs", 8, 12, 197, 64), _t("kt", 8, 12, 64, 197)
    score, part = _t("score", 8, 12, 197, 197), _t("part", 8, 12, 197, 197)
    mixed, back, flat = _t("mixed", 8, 12, 197, 64), _t("back", 8, 197, 12, 64), _t("flat", 8, 197, 768)
    out = _t("out", 768, 768)
    ops = [
        _op("Transpose", [packed], turned),
        *(_op("Gather", [turned, _t(f"at{piece.name}")], piece) for piece in parts),
        _op("Mul", [parts[0], scale], scaled),
        _op("Transpose", [parts[1]], keys),
        _op("MatMul", [scaled, keys], score),
        _op("Softmax", [score], part),
        _op("MatMul", [part, parts[2]], mixed),
        _op("Transpose", [mixed], back),
        _op("Reshape", [back], flat),
        _op("MatMul", [flat, out], _t("y", 8, 197, 768), [out]),
    ]
    return _graph(*ops, *([_op("Relu", [turned], _t("copy", 3, 8, 12, 197, 64))] if kept else []))


@pytest.mark.parametrize("runtime", [mode for mode in LaunchMode if mode.fuses_attention])
def test_whole_attention_reads_its_operands_where_they_lie(runtime: LaunchMode) -> None:
    whole = list_kernels(_attention_of_one_projection(), "float16", runtime)
    assert whole.op_types == ("MatMul", "MatMul")
    assert [FAMILIES[family] for family in whole.ops.family] == ["attention", "matmul"]
    pieces = list_kernels(_attention_of_one_projection(), "float32", runtime).op_types
    assert pieces.count("Gather") == 3 and "Transpose" in pieces


def test_what_others_read_too_is_written_beside_fused_attention() -> None:
    kinds = list_kernels(_attention_of_one_projection(kept=True), "float16", LaunchMode.FUSED).op_types
    assert "Transpose" in kinds


@pytest.mark.parametrize(("elements", "kernels"), [(64, 0), (1 << 20, 1)])
def test_a_few_whole_numbers_cost_nothing_unless_they_are_found_in_many(elements: int, kernels: int) -> None:
    index = Tensor("found", "int64", (1,))
    graph = _graph(_op("ArgMax", [_t("x", 1, elements)], index))
    assert len(list_kernels(graph, "float32", LaunchMode.FUSED).count) == kernels


def _normalise(*, centred: bool) -> list[Op]:
    """Return what exporters write for a layer normalisation, or without centring for RMS normalisation."""
    row, scale = _t("mean", 8, 16, 1), _t("scale", 32)
    middle = _t("d", 8, 16, 32) if centred else X
    first = [_op("ReduceMean", [X], row), _op("Sub", [X, row], middle)] if centred else []
    inverse = [] if centred else [_op("Reciprocal", [_t("root", 8, 16, 1)], _t("inverse", 8, 16, 1))]
    return [
        *first,
        _op("Pow", [middle, _t("two")], _t("square", 8, 16, 32), [_t("two")]),
        _op("ReduceMean", [_t("square", 8, 16, 32)], _t("variance", 8, 16, 1)),
        _op("Add", [_t("variance", 8, 16, 1), _t("eps")], _t("sum", 8, 16, 1), [_t("eps")]),
        _op("Sqrt", [_t("sum", 8, 16, 1)], _t("root", 8, 16, 1)),
        *inverse,
        _op(
            "Div" if centred else "Mul",
            [middle, _t("root" if centred else "inverse", 8, 16, 1)],
            _t("normal", 8, 16, 32),
        ),
        _op("Mul", [_t("normal", 8, 16, 32), scale], _t("y", 8, 16, 32), [scale]),
    ]


@pytest.mark.parametrize("runtime", list(LaunchMode))
def test_a_layer_normalisation_in_pieces_is_the_kernel_that_it_was_before_it_was_exported(runtime: LaunchMode) -> None:
    scale = _t("scale", 32)
    whole = list_kernels(_graph(_op("LayerNormalization", [X, scale], _t("y", 8, 16, 32), [scale])), "float32", runtime)
    pieces = list_kernels(_graph(*_normalise(centred=True)), "float32", runtime)
    assert len(pieces.ops) == 1
    assert FAMILIES[pieces.ops.family[0]] == "norm"
    assert pieces.ops.row[0] == whole.ops.row[0] == 32
    assert pieces.ops.bytes_moved[0] == pytest.approx(whole.ops.bytes_moved[0], rel=0.01)


@pytest.mark.parametrize(("runtime", "kernels"), [(LaunchMode.FUSED, 1), (LaunchMode.EAGER, 7)])
def test_an_rms_normalisation_in_pieces_is_one_kernel_where_a_runtime_fuses(runtime: LaunchMode, kernels: int) -> None:
    assert len(list_kernels(_graph(*_normalise(centred=False)), "float32", runtime).ops) == kernels


def test_what_follows_from_shapes_alone_takes_no_kernel() -> None:
    sizes = Tensor("sizes", "int64", (3,))
    scaled = _op("Mul", [X, _t("root", 1)], _t("y", 8, 16, 32))
    graph = _graph(
        _op("Shape", [X], sizes),
        _op("Cast", [sizes], _t("size", 1)),
        _op("Sqrt", [_t("size", 1)], _t("root", 1)),
        scaled,
    )
    assert list_kernels(graph, "float32", LaunchMode.EAGER).op_types == ("Mul",)


@pytest.mark.parametrize(("runtime", "kernels"), [(LaunchMode.FUSED, 1), (LaunchMode.EAGER, 4)])
def test_quantising_is_part_of_what_is_quantised_where_a_runtime_fuses(runtime: LaunchMode, kernels: int) -> None:
    scale, narrow = _t("scale"), Tensor("narrow", "int8", (32, 64))
    weight = _op("DequantizeLinear", [narrow, scale], W, [narrow, scale])
    product = _op("MatMul", [X, W], H)
    made = Tensor("q", "int8", (8, 16, 64))
    quantised = _op("QuantizeLinear", [H, scale], made, [scale])
    whole = _op("DequantizeLinear", [made, scale], _t("y", 8, 16, 64), [scale])
    assert len(list_kernels(_graph(weight, product, quantised, whole), "int8", runtime).ops) == kernels


def test_quantised_products_and_recurrent_layers_of_the_runtime_are_products() -> None:
    product = _op("MatMulIntegerToFloat", [X, W, _t("scale"), _t("other")], H, [W])
    steps = _op("DynamicQuantizeLSTM", [_t("s", 20, 2, 32), _t("u", 1, 32, 256)], _t("o", 20, 1, 2, 64), hidden_size=64)
    for op, counts in ((product, (1,)), (steps, (1, 20))):
        kernels = list_kernels(_graph(op), "int8", LaunchMode.FUSED)
        assert {FAMILIES[family] for family in kernels.ops.family} == {"matmul"} and kernels.count == counts


@pytest.mark.parametrize("runtime", list(LaunchMode))
def test_nothing_runs_for_tensors_without_elements(runtime: LaunchMode) -> None:
    empty = _op("MatMul", [_t("x", 0, 16, 32), W], _t("h", 0, 16, 64), [W])
    assert (
        len(list_kernels(_graph(empty, _op("Relu", [_t("h", 0, 16, 64)], _t("y", 0, 16, 64))), "float16", runtime).ops)
        == 0
    )
