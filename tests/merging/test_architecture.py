from __future__ import annotations

from pathlib import Path

from gpuprof.merging.groups import count_graph, group_architectures, relative_distance
from gpuprof.merging.pipeline import read_sources
from tests.merging.models import finetune_model, residual, save, transformer


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
