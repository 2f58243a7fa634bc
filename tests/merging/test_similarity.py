from __future__ import annotations

from pathlib import Path

from gpuprof.merging.pipeline import read_weights
from gpuprof.merging.similarity import compare_models, similarity_grid
from tests.merging.models import finetune_model, residual, save


def test_layers_of_the_same_name_keep_rows_of_their_own(tmp_path: Path) -> None:
    model = residual(blocks=2)
    for node in model.graph.node:
        if node.op_type == "Conv":
            node.name = "conv"
    paths = [save(model, tmp_path, "a"), save(finetune_model(model, 0.5), tmp_path, "b")]
    first, second = read_weights(paths)
    rows, columns, grid = similarity_grid(compare_models(first, second), "conv")
    assert rows == columns == ["conv", *(f"conv ({i})" for i in range(2, 6))]
    assert grid.shape == (5, 5)
    assert grid[0, 0] == 1.0
    assert grid[4, 4] < 0.1
