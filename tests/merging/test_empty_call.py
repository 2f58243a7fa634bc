"""Models that end the process at an empty batch are merged all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpuprof.graph.merged_model import read_merged
from gpuprof.merging.empty_call import can_run, is_risky
from gpuprof.merging.pipeline import MergeOptions, merge_sources, read_sources, write_merged
from gpuprof.zoo.network import Network
from gpuprof.zoo.random_sequence_nets import draw_rnn
from tests.merging.models import save, transformer


@pytest.fixture
def recurrent(tmp_path: Path) -> Path:
    return save(draw_rnn(Network(), 3), tmp_path, "a")


def test_recurrent_ops_are_tried_in_another_process_and_a_row_stands_for_who_is_absent(
    recurrent: Path, tmp_path: Path
) -> None:
    paths = [recurrent, recurrent]
    sources = read_sources(paths)
    assert all(is_risky(source.nodes) for source in sources)
    options = MergeOptions()
    report = write_merged(merge_sources(sources, options), tmp_path / "m.onnx", options)
    assert report.proof is not None
    described = read_merged(tmp_path / "m.onnx")
    assert described is not None
    for member in described.members:
        assert can_run(tmp_path / "m.onnx", _call(described, member.name), 1)


def _call(described: object, present: str) -> dict[str, np.ndarray]:
    from gpuprof.graph.merged_model import MergedModel

    assert isinstance(described, MergedModel)
    member = described.member(present)
    given = {
        value.name: np.zeros(
            [2 if dim is None else dim for dim in value.shape], np.int64 if "int" in value.dtype else np.float32
        )
        for value in member.inputs
    }
    return described.feeds({present: given})


def test_a_call_that_cannot_be_made_is_told_from_one_that_can(tmp_path: Path) -> None:
    path = save(transformer(layers=1), tmp_path, "t")
    fed = {name: np.ones((2, 6), np.int64) for name in ("ids", "mask")}
    assert can_run(path, fed, 1)
    assert not can_run(path, fed | {"mask": np.ones((2, 5), np.int64)}, 1)
