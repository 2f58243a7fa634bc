from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gpuprof.merging.pipeline import read_weights
from gpuprof.merging.similarity import (
    TOLERANCE,
    CommonBlock,
    Mask,
    Matrix,
    best_matching,
    common_blocks,
    compare_models,
    largest_rectangle,
    same_entries,
    similarity_grid,
)
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


def _assert_common(a: Matrix, b: Matrix, block: CommonBlock) -> None:
    mine = a[block.a_row : block.a_row + block.rows, block.a_column : block.a_column + block.columns]
    theirs = b[block.b_row : block.b_row + block.rows, block.b_column : block.b_column + block.columns]
    assert mine.shape == theirs.shape == (block.rows, block.columns)
    assert same_entries(mine, theirs).all()


def _matrix(kind: str, random: np.random.Generator, rows: int, columns: int) -> Matrix:
    if kind == "integers":
        return random.integers(0, 4, (rows, columns))
    if kind == "few values":
        return (0.3 * random.integers(0, 9, (rows, columns))).astype(np.float32)
    if kind == "half":
        return random.standard_normal((rows, columns)).astype(np.float16)
    if kind == "near the tolerance":  # agreeing is not transitive here
        return (0.5e-7 * random.integers(0, 300, (rows, columns))).astype(np.float32)
    return random.standard_normal((rows, columns)).astype(np.float32)


def _largest_area(a: Matrix, b: Matrix) -> int:
    """Return the entries of the largest common block by trying every displacement."""
    best = 0
    for down in range(1 - len(a), len(b)):
        for right in range(1 - a.shape[1], b.shape[1]):
            mine = a[max(0, -down) : len(b) - down, max(0, -right) : b.shape[1] - right]
            row, column = max(0, down), max(0, right)
            mask = same_entries(mine, b[row : row + len(mine), column : column + mine.shape[1]])
            *_, rows, columns = largest_rectangle(mask)
            best = max(best, rows * columns)
    return best


_KINDS = ("integers", "few values", "half", "near the tolerance", "floats")


@pytest.mark.parametrize("kind", _KINDS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_search_finds_what_trying_all_displacements_finds(kind: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    shapes = [tuple(int(n) for n in random.integers(17, 24, 2)) for _ in range(2)]
    a, b = (_matrix(kind, random, *shape) for shape in shapes)
    rows, columns = (int(n) for n in random.integers(2, 9, 2))
    b[2 : 2 + rows, 4 : 4 + columns] = a[5 : 5 + rows, 1 : 1 + columns]
    block = common_blocks([a], [b])[0, 0]
    assert block.exact
    assert block.area == _largest_area(a, b)
    _assert_common(a, b, block)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_small_matrices_of_any_shape_are_searched_whole(seed: int) -> None:
    random = np.random.default_rng(seed)
    a = random.integers(0, 3, random.integers(1, 6, 2)).astype(np.float32)
    b = random.integers(0, 3, random.integers(1, 6, 2)).astype(np.float32)
    best = max(
        (
            rows * columns
            for rows in range(1, min(len(a), len(b)) + 1)
            for columns in range(1, min(a.shape[1], b.shape[1]) + 1)
            for i in range(len(a) - rows + 1)
            for j in range(a.shape[1] - columns + 1)
            for k in range(len(b) - rows + 1)
            for m in range(b.shape[1] - columns + 1)
            if np.array_equal(a[i : i + rows, j : j + columns], b[k : k + rows, m : m + columns])
        ),
        default=0,
    )
    assert common_blocks([a], [b])[0, 0].area == best


def test_values_agree_up_to_the_tolerance_and_no_further() -> None:
    a = np.random.default_rng(0).uniform(0.01, 0.1, (40, 40))
    within, beyond = a + 0.99 * TOLERANCE, a + 1.01 * TOLERANCE
    blocks = common_blocks([a], [within, beyond])
    assert blocks[0, 0].area == 1600
    assert blocks[0, 1].area < 1600


def test_equal_matrices_share_everything_and_pairs_are_told_apart() -> None:
    random = np.random.default_rng(1)
    first = [random.standard_normal((30, 25)).astype(np.float32) for _ in range(3)]
    second = [first[1], first[0].copy(), random.standard_normal((30, 25)).astype(np.float32)]
    blocks = common_blocks(first, second)
    assert {pair for pair, block in blocks.items() if block.area == 750} == {(1, 0), (0, 1)}


def _mostly_one_value(side: int) -> list[Matrix]:
    """Return matrices of mostly zeros among values so dense that agreeing is not transitive."""
    random = np.random.default_rng(3)
    matrices = [0.6e-7 * random.integers(10, 10**5, (side, side)) for _ in range(2)]
    for matrix in matrices:
        matrix[random.random((side, side)) < 0.6] = 0
    return list(matrices)


def test_a_search_that_is_given_up_says_that_more_may_be_there() -> None:
    a, b = _mostly_one_value(90)
    block = common_blocks([a], [b])[0, 0]
    assert not block.exact
    _assert_common(a, b, block)


@pytest.mark.parametrize("kind", ["bytes", "floats", "nearly the same"])
def test_a_block_of_large_matrices_is_found(kind: str) -> None:
    random = np.random.default_rng(4)
    a, b = (
        random.integers(-128, 128, shape).astype(np.int8) if kind == "bytes" else _matrix(kind, random, *shape)
        for shape in ((300, 400), (350, 500))
    )
    if kind == "nearly the same":
        a, b = a.astype(np.float64), b.astype(np.float64)
    block: Any = a[100:200, 50:250]
    b[210:310, 270:470] = block + random.uniform(-0.9e-7, 0.9e-7, block.shape) if kind == "nearly the same" else block
    common = common_blocks([a], [b])[0, 0]
    assert common.area >= 100 * 200 and (common.b_row - common.a_row, common.b_column - common.a_column) == (110, 220)
    _assert_common(a, b, common)


def _by_trying_all(mask: Mask) -> int:
    rows, columns = mask.shape
    return max(
        (
            (b - t) * (r - left)
            for t in range(rows)
            for b in range(t + 1, rows + 1)
            for left in range(columns)
            for r in range(left + 1, columns + 1)
            if mask[t:b, left:r].all()
        ),
        default=0,
    )


@given(arrays(np.bool_, st.tuples(st.integers(1, 7), st.integers(1, 7))))
def test_it_is_as_large_as_the_best_of_all_rectangles_and_all_true(mask: Mask) -> None:
    row, column, rows, columns = largest_rectangle(mask)
    assert rows * columns == _by_trying_all(mask)
    assert mask[row : row + rows, column : column + columns].all()


def test_the_sum_is_maximal_where_the_nearest_first_would_not_be() -> None:
    assert best_matching({(0, 0): 0.9, (0, 1): 0.8, (1, 0): 0.8}) == {0: 1, 1: 0}


def test_what_has_no_edge_is_not_matched() -> None:
    assert best_matching({(3, 7): 0.5, (4, 7): 0.6}) == {4: 7}
    assert best_matching({}) == {}
