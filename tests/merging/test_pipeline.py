"""What users do wrong, or unusually: each comes out right or as one clear line."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from gpuprof.errors import InfeasibleError, InputError
from gpuprof.graph.merged_model import read_merged
from gpuprof.merging.gain import TYPICAL_CPU
from gpuprof.merging.groups import count_graph, group_architectures, relative_distance
from gpuprof.merging.pipeline import MergeOptions, MergeReport, merge_sources, propose_merges, read_sources
from tests.merging.models import Builder, finetune_model, recurrent, residual, save, transformer

FORCE = MergeOptions(force=True)


def _write(paths: list[Path], output: Path, options: MergeOptions = FORCE) -> MergeReport:
    return merge_sources(read_sources(paths, options.dims), options).write(output)


def _dense(dtype: int = TensorProto.FLOAT, length: int | str = 4, opset: int = 17, seed: int = 0) -> ModelProto:
    b = Builder(seed)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    random = np.random.default_rng(seed)
    x = "x"
    for _ in range(3):
        x = b.add("Relu", b.add("MatMul", x, b.constant((0.3 * random.standard_normal((16, 16))).astype(kind))))
    b.nodes[-1].output[0] = "y"
    return b.model({"x": (dtype, ["batch", length, 16])}, {"y": (dtype, ["batch", length, 16])}, opset)


def _make_quantised(seed: int = 0) -> ModelProto:
    b = Builder(seed)
    random = np.random.default_rng(seed)
    scale, zero = b.constant(np.array(0.05, np.float32)), b.constant(np.array(0, np.int8))
    x = "x"
    for _ in range(3):
        x = b.add("DequantizeLinear", b.add("QuantizeLinear", x, scale, zero), scale, zero)
        weight = b.constant(random.integers(-100, 100, (16, 16)).astype(np.int8))
        x = b.add("MatMul", x, b.add("DequantizeLinear", weight, b.constant(np.array(0.003, np.float32))))
    b.nodes[-1].output[0] = "y"
    return b.model({"x": (1, ["batch", 16])}, {"y": (1, ["batch", 16])})


def test_half_precision_weights_are_merged_and_proven_with_their_own_tolerance(tmp_path: Path) -> None:
    paths = [save(_dense(TensorProto.FLOAT16), tmp_path, name) for name in ("a", "b")]
    report = _write(paths, tmp_path / "m.onnx")
    assert len(report.merged) == 3
    assert report.proof is not None
    assert {difference.tolerance for difference in report.proof.differences} == {4e-3}


def _amplifying(by: float) -> ModelProto:
    b = Builder(0)
    weight = (3e-4 * np.random.default_rng(1).standard_normal((4096, 64))).astype(np.float32) + np.float32(by)
    b.add("Exp", b.add("MatMul", "x", b.constant(weight)))
    b.nodes[-1].output[0] = "y"
    return b.model({"x": (1, ["batch", 4096])}, {"y": (1, ["batch", 64])})


def test_a_model_that_amplifies_is_proven_with_large_inputs_too(tmp_path: Path) -> None:
    paths = [save(_amplifying(by), tmp_path, name) for name, by in (("a", 0.0), ("b", 9e-8))]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InfeasibleError, match=r"differs by 0\.0001.*nothing is written"):  # 5e-6 at a deviation of 1
        _write(paths, tmp_path / "m.onnx")
    assert sorted(tmp_path.iterdir()) == before


def test_quantised_weights_stay_quantised_and_are_shared(tmp_path: Path) -> None:
    paths = [save(_make_quantised(), tmp_path, name) for name in ("a", "b")]
    report = _write(paths, tmp_path / "m.onnx")
    assert len(report.merged) == 3
    weights = onnx.load(str(tmp_path / "m.onnx")).graph.initializer
    assert sum(t.data_type == TensorProto.INT8 and list(t.dims) == [16, 16] for t in weights) == 3


def test_an_older_opset_is_raised_to_the_newer_one(tmp_path: Path) -> None:
    paths = [save(_dense(opset=13), tmp_path, "a"), save(_dense(opset=17), tmp_path, "b")]
    report = _write(paths, tmp_path / "m.onnx")
    assert len(report.merged) == 3
    assert onnx.load(str(tmp_path / "m.onnx")).opset_import[0].version == 17


def test_a_model_that_cannot_be_converted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: ModelProto, opset: int) -> ModelProto:
        raise RuntimeError("no adapter\nfor this")

    monkeypatch.setattr(onnx.version_converter, "convert_version", refuse)
    paths = [save(_dense(opset=13), tmp_path, "a"), save(_dense(opset=17), tmp_path, "b")]
    with pytest.raises(InputError, match=r"a\.onnx has opset 13 and cannot be converted to 17: no adapter for this"):
        _write(paths, tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_a_free_length_is_refused_by_name_and_merged_once_it_is_fixed(tmp_path: Path) -> None:
    paths = [save(_dense(length="tokens"), tmp_path, name) for name in ("a", "b")]
    with pytest.raises(InputError, match=r"a\.onnx: input x has the free dimension 'tokens'.*--dim tokens=SIZE"):
        _write(paths, tmp_path / "m.onnx")
    report = _write(paths, tmp_path / "m.onnx", MergeOptions(force=True, dims={"tokens": 5}))
    assert len(report.merged) == 3
    with pytest.raises(InputError, match="no model has a free dimension 'words'"):
        read_sources(paths, {"words": 5})


def test_a_fixed_batch_is_refused_with_the_command_that_frees_it(tmp_path: Path) -> None:
    paths = [save(residual(batch=batch), tmp_path, name) for name, batch in (("a", "batch"), ("b", 2))]
    with pytest.raises(InputError, match=r"b\.onnx has a fixed batch.*gpuprof zoo rebatch"):
        read_sources(paths)


def test_different_fixed_lengths_stay_apart_and_say_why(tmp_path: Path) -> None:
    paths = [save(_dense(length=4), tmp_path, "a"), save(_dense(length=5), tmp_path, "b")]
    report = merge_sources(read_sources(paths), FORCE).report
    assert not report.merged
    assert any("cannot be concatenated" in row.reason for row in report.operators)


def test_external_data_is_read_and_written_beside_the_merged_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    paths = []
    for name in ("a", "b"):
        path = tmp_path / "in" / f"{name}.onnx"
        onnx.save_model(_dense(), str(path), save_as_external_data=True, location=f"{name}.bin", size_threshold=64)
        paths.append(path)
    report = _write(paths, tmp_path / "m.onnx")
    assert len(report.merged) == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "m.onnx", "m.onnx.data"]
    inline = {
        tensor.name
        for tensor in onnx.load(str(tmp_path / "m.onnx"), load_external_data=False).graph.initializer
        if tensor.data_location != TensorProto.EXTERNAL and np.prod(tensor.dims) * 4 >= 1024
    }
    assert not inline
    again = _write(paths, tmp_path / "m.onnx")  # over what is there
    assert again.weight_bytes_after == report.weight_bytes_after
    size = (tmp_path / "m.onnx.data").stat().st_size
    assert size < report.weight_bytes_before  # not appended to, and shared weights once
    assert (tmp_path / "m.onnx.data").stat().st_mode == (tmp_path / "m.onnx").stat().st_mode
    described = read_merged(tmp_path / "m.onnx")
    assert described is not None
    assert [member.name for member in described.members] == ["a", "b"]


def test_weights_beyond_what_one_file_holds_go_to_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = residual(channels=16)
    paths = [save(base, tmp_path, "a"), save(finetune_model(base, 0.5), tmp_path, "b")]
    merged = merge_sources(read_sources(paths), FORCE)
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", 2000)
    merged.write(tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_size > 1000
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)


def test_a_subgraph_that_uses_outer_values_keeps_working(tmp_path: Path) -> None:
    model = _dense()
    branches = {
        name: helper.make_graph(
            [helper.make_node(op, ["inner"], [f"{name}_out"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", 1, ["batch", 4, 16])],
        )
        for name, op in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }
    model.graph.node[-1].output[0] = "inner"
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "flag"))
    model.graph.node.append(helper.make_node("If", ["flag"], ["y"], **branches))
    paths = [save(model, tmp_path, name) for name in ("a", "b")]
    assert len(_write(paths, tmp_path / "m.onnx").merged) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"omega": 1.5}, "omega must be from 0 to 1"),
        ({"omega": float("nan")}, "omega must be from 0 to 1"),
        ({"batches": {"a": 0}}, "a batch must be at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        MergeOptions(**options)  # type: ignore[arg-type]


def test_files_that_are_no_models_are_refused_in_one_line(tmp_path: Path) -> None:
    good = save(_dense(), tmp_path, "a")
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"not a model")
    for path in (bad, tmp_path / "missing.onnx", tmp_path):
        with pytest.raises(InputError) as caught:
            read_sources([good, path])
        assert "\n" not in str(caught.value)


def test_an_output_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    paths = [save(_dense(), tmp_path, name) for name in ("a", "b")]
    with pytest.raises(InputError, match="is a directory"):
        _write(paths, tmp_path)
    with pytest.raises(InputError, match="cannot write"):
        _write(paths, tmp_path / "nowhere" / "m.onnx")


def test_proposals_hold_models_that_share_and_name_the_rest(tmp_path: Path) -> None:
    base, image = transformer(), residual()
    models = [base, image, finetune_model(base, 0.6), finetune_model(image, 0.6), transformer(seed=3)]
    paths = [save(model, tmp_path, f"m{i}") for i, model in enumerate(models)]
    proposals = propose_merges(paths, FORCE)
    assert [proposal.report.models for proposal in proposals.merges] == [("m0", "m2"), ("m1", "m3")]
    assert [name for name, _ in proposals.left_out] == ["m4"]
    assert proposals.merges[0].write(tmp_path / "merged.onnx").proof is not None


def test_the_same_models_give_the_same_file(tmp_path: Path) -> None:
    base = transformer()
    paths = [save(base, tmp_path, "a"), save(finetune_model(base, 0.6), tmp_path, "b")]
    for name in ("one", "two"):
        _write(paths, tmp_path / f"{name}.onnx")
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()


def test_fine_tuned_copies_are_one_group_and_another_network_is_another(tmp_path: Path) -> None:
    base, image = transformer(), residual()
    models = [base, image, finetune_model(base, 0.5), residual(blocks=3, seed=4), transformer(layers=4)]
    paths = [save(model, tmp_path, f"m{i}") for i, model in enumerate(models)]
    graphs = [count_graph(source) for source in read_sources(paths)]
    assert group_architectures(graphs) == [[0, 2, 4], [1, 3]]
    assert group_architectures(graphs, eps=1e-7) == [[0, 2], [1, 3], [4]]
    assert relative_distance(graphs[0], graphs[2]) == 0
    assert 0 < relative_distance(graphs[0], graphs[4]) == relative_distance(graphs[4], graphs[0]) <= 0.25
    assert relative_distance(graphs[0], graphs[1]) > 0.5


@pytest.mark.parametrize("op_type", ["LSTM", "GRU", "RNN"])
def test_models_with_one_recurrent_op_and_heads_of_their_own_are_merged(op_type: str, tmp_path: Path) -> None:
    paths = [save(recurrent(op_type, head_seed=seed), tmp_path, f"m{seed}") for seed in (1, 2)]
    (proposal,) = propose_merges(paths).merges
    report = proposal.write(tmp_path / "merged.onnx")
    held = {row.op_type: row for row in report.operators}
    assert held[op_type].how in ("merged", "shared")
    assert held[op_type].similarity == 1.0
    assert held["Gather"].how in ("merged", "shared")
    assert report.saved_bytes >= held[op_type].saved_bytes + held["Gather"].saved_bytes > 0
    assert report.weight_bytes_after < 0.55 * report.weight_bytes_before
    described = read_merged(tmp_path / "merged.onnx")
    assert described is not None
    assert [member.absent_rows for member in described.members] == [1, 1]


def test_recurrent_ops_of_other_weights_are_left_alone_and_said_why(tmp_path: Path) -> None:
    paths = [save(recurrent(seed=seed, head_seed=seed), tmp_path, f"m{seed}") for seed in (1, 2)]
    proposals = propose_merges(paths)
    assert not proposals.merges
    merged = merge_sources(read_sources(paths), MergeOptions())
    rows = [row for row in merged.report.operators if row.op_type == "LSTM"]
    assert [row.how for row in rows] == ["apart", "apart"]
    assert all("whole or not at all" in row.reason for row in rows)


def test_a_table_is_read_by_rows_so_that_looking_up_once_saves_no_bytes(tmp_path: Path) -> None:
    paths = [save(recurrent(vocabulary=20_000, head_seed=seed), tmp_path, f"m{seed}") for seed in (1, 2)]
    options = MergeOptions(force=True)
    merged = merge_sources(read_sources(paths), options)
    table_bytes = 20_000 * 32 * 4
    assert merged.report.saved_bytes > table_bytes
    assert merged.report.gain_s < table_bytes / TYPICAL_CPU.bytes_per_s


def _make_normalised(bias: bool = True, eps: float = 1e-3) -> ModelProto:
    """Return two convolutions, each with a batch normalisation behind it."""
    b, x = Builder(), "x"
    for _ in range(2):
        x = b.add("Conv", x, b.weight(8, 8, 3, 3), *((b.weight(8),) if bias else ()), pads=[1, 1, 1, 1])
        positive = [b.constant(np.linspace(0.5, 1.5, 8, dtype=np.float32)) for _ in range(2)]
        x = b.add("BatchNormalization", x, positive[0], b.weight(8), b.weight(8), positive[1], epsilon=eps)
    b.nodes[-1].output[0] = "y"
    shape: list[int | str] = ["batch", 8, 4, 4]
    return b.model({"x": (TensorProto.FLOAT, shape)}, {"y": (TensorProto.FLOAT, shape)})


def _change_shift(model: ModelProto, which: int) -> ModelProto:
    """Return a copy with the shift of one normalisation changed."""
    copy = ModelProto()
    copy.CopyFrom(model)
    node = [node for node in copy.graph.node if node.op_type == "BatchNormalization"][which]
    for tensor in copy.graph.initializer:
        if tensor.name == node.input[2]:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.5), tensor.name))
    return copy


@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_share_what_they_hold_with_their_normalisations(bias: bool, tmp_path: Path) -> None:
    base = _make_normalised(bias)
    paths = [save(base, tmp_path, "a"), save(_change_shift(base, 1), tmp_path, "b")]
    sources = read_sources(paths)
    for source in sources:
        assert [node.op_type for node in source.nodes] == ["Conv", "Conv"]
    digests = [[source.digest(name) for node in source.nodes for name in node.input[1:]] for source in sources]
    assert [first == second for first, second in zip(*digests, strict=True)] == [True, True, True, False]
    options = MergeOptions()
    report = merge_sources(sources, options).write(tmp_path / "m.onnx")
    assert report.proof is not None  # both give what they gave
    assert len(report.merged) + len(report.shared) == 2
