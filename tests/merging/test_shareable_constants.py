"""Tables and recurrent ops hold their weights whole: models that have the same ones share them."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, numpy_helper

from gpuprof.graph.merged_model import read_merged
from gpuprof.merging.pipeline import MergeOptions, merge_sources, propose_merges, read_sources
from gpuprof.merging.similarity import shareable_constants
from tests.merging.models import Array, Builder, recurrent, save


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


def test_recurrent_ops_run_apart_on_their_common_weights_and_a_row_stands_for_an_absent_model(tmp_path: Path) -> None:
    paths = [save(recurrent(head_seed=seed), tmp_path, f"m{seed}") for seed in (1, 2)]
    options = MergeOptions(force=True)
    report = merge_sources(read_sources(paths), options).write(tmp_path / "merged.onnx")
    (row,) = [row for row in report.operators if row.op_type == "LSTM"]
    assert row.how == "shared"
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
    assert merged.report.gain.saved_bytes < table_bytes


def test_a_table_that_is_a_small_part_of_its_model_is_no_reason_to_merge(tmp_path: Path) -> None:
    def positions(seed: int) -> Path:
        same, builder = Builder(7), Builder(seed)
        same.weight(8, 4)
        table = builder.constant(_value(same))
        x = builder.add("Gather", table, "ids")
        builder.add("MatMul", x, builder.weight(4, 4000))
        builder.nodes[-1].output[0] = "y"
        model = builder.model(
            {"ids": (TensorProto.INT64, ["batch", 5])}, {"y": (TensorProto.FLOAT, ["batch", 5, 4000])}
        )
        return save(model, tmp_path, f"p{seed}")

    sources = read_sources([positions(1), positions(2)])
    assert all(not shareable_constants(source, source.nodes[0]) for source in sources)
    assert not propose_merges([positions(1), positions(2)]).merges


def _value(builder: Builder) -> Array:
    return numpy_helper.to_array(builder.weights[0])
