from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.merging.architecture import (
    OperatorTypeGraph,
    edit_distance,
    group_architectures,
    read_type_graph,
    relative_distance,
)
from gpuprof.merging.pipeline import read_sources
from tests.merging.models import finetune_model, residual, save, transformer


def _chain(*types: str) -> OperatorTypeGraph:
    return OperatorTypeGraph(types, tuple((i, i + 1) for i in range(len(types) - 1)))


def test_the_distance_of_a_graph_and_itself_is_zero() -> None:
    long = _chain(*["Conv", "Relu"] * 20)
    assert edit_distance(long, long) == 0


def test_an_operator_replaced_is_an_edit_and_an_operator_gone_takes_its_edge_with_it() -> None:
    assert edit_distance(_chain("Conv", "Relu"), _chain("Conv", "Add")) == 1  # one replacement
    assert edit_distance(_chain("Conv", "Relu"), _chain("Conv")) == 2  # an operator and its edge


@pytest.mark.parametrize(("position", "edits"), [(0, 2), (20, 2)])
def test_a_long_graph_with_an_operator_more_at_an_end_is_two_edits_away(position: int, edits: int) -> None:
    types = [f"Op{i}" for i in range(20)]
    longer = [*types[:position], "More", *types[position:]]
    assert edit_distance(_chain(*types), _chain(*longer)) == edits


def test_fine_tuned_copies_are_one_group_and_another_network_is_another(tmp_path: Path) -> None:
    base, image = transformer(), residual()
    models = [base, image, finetune_model(base, 0.5), residual(blocks=3, seed=4), transformer(layers=4)]
    paths = [save(model, tmp_path, f"m{i}") for i, model in enumerate(models)]
    architectures = [read_type_graph(source) for source in read_sources(paths)]
    assert group_architectures(architectures) == [[0, 2], [1, 3], [4]] or group_architectures(architectures) == [
        [0, 2, 4],
        [1, 3],
    ]
    assert group_architectures(architectures, eps=1e-7) == [[0, 2], [1, 3], [4]]
    assert relative_distance(architectures[0], architectures[1]) > 0.25
