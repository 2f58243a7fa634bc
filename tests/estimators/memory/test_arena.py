from __future__ import annotations

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.estimators.memory.arena import arena_footprint

KIB = 256  # float32 values in a kibibyte


def _tensor(name: str, kib: int) -> Tensor:
    return Tensor(name, "float32", (kib * KIB,))


def _graph(*ops: tuple[str, str, list[tuple[str, int]], tuple[str, int]]) -> ModelGraph:
    """Make a graph of (op type, name, inputs, output); the last op's output is the graph's, "x" its input."""
    made = tuple(
        Op(name, kind, "", tuple(_tensor(*tensor) for tensor in inputs), (_tensor(*output),), (), {}, 0, 0, 0)
        for kind, name, inputs, output in ops
    )
    return ModelGraph("g", 1, made, (_tensor("x", 4),), made[-1].outputs, (), 17, "", "")


def test_an_activation_writes_over_what_nobody_else_reads() -> None:
    alone = _graph(("Conv", "c", [("x", 4)], ("a", 8)), ("Relu", "r", [("a", 8)], ("y", 8)))
    assert arena_footprint(alone).peak == arena_footprint(alone).reserved == 8 * 1024
    read_again = _graph(
        ("Conv", "c", [("x", 4)], ("a", 8)),
        ("Relu", "r", [("a", 8)], ("b", 8)),
        ("Concat", "j", [("a", 8), ("b", 8)], ("y", 16)),
    )
    assert arena_footprint(read_again).peak == (8 + 8 + 16) * 1024


def test_a_view_costs_nothing_and_keeps_its_buffer_until_it_is_read() -> None:
    graph = _graph(
        ("Conv", "c", [("x", 4)], ("a", 8)),
        ("Reshape", "v", [("a", 8)], ("b", 8)),
        ("MatMul", "m", [("b", 8)], ("y", 2)),
    )
    assert arena_footprint(graph).peak == 10 * 1024


def test_a_free_buffer_serves_again_and_a_much_larger_one_is_cut() -> None:
    chain = _graph(
        ("Conv", "1", [("x", 4)], ("a", 8)),
        ("Conv", "2", [("a", 8)], ("b", 8)),
        ("Conv", "3", [("b", 8)], ("c", 8)),
        ("Conv", "4", [("c", 8)], ("y", 2)),
    )
    footprint = arena_footprint(chain)
    assert (footprint.peak, footprint.reserved) == (16 * 1024, 16 * 1024)


def test_what_grows_fits_no_free_buffer_so_that_more_is_reserved_than_used() -> None:
    growing = _graph(
        ("Conv", "1", [("x", 4)], ("a", 4)),
        ("Conv", "2", [("a", 4)], ("b", 8)),
        ("Conv", "3", [("b", 8)], ("c", 16)),
        ("Conv", "4", [("c", 16)], ("y", 32)),
    )
    footprint = arena_footprint(growing)
    assert footprint.peak == (16 + 32) * 1024
    assert footprint.reserved == (4 + 8 + 16 + 32) * 1024


def test_what_nobody_reads_is_let_go_at_once_and_what_the_model_gives_is_kept() -> None:
    graph = _graph(
        ("Conv", "1", [("x", 4)], ("unread", 8)),
        ("Conv", "2", [("x", 4)], ("a", 8)),
        ("Conv", "3", [("a", 8)], ("y", 8)),
    )
    assert arena_footprint(graph).peak == 16 * 1024
