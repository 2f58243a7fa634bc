from __future__ import annotations

import math

import pytest

from gpuprof.placement.program import Program


def knapsack() -> Program:
    program = Program()
    row = program.row(high=10.0)
    for value, weight in ((6.0, 5.0), (5.0, 4.0), (4.5, 4.0)):
        program.column(-value, {row: weight}, 1.0)
    return program


def test_the_best_whole_solution_is_found_and_proven() -> None:
    solution = knapsack().solve()
    assert solution is not None
    assert solution.values == (1.0, 1.0, 0.0)
    assert solution.objective == pytest.approx(-11.0)
    assert solution.bound == pytest.approx(-11.0)
    assert solution.proven


def test_relaxed_it_is_a_bound() -> None:
    relaxed = knapsack().solve(relaxed=True)
    assert relaxed is not None
    assert relaxed.objective == pytest.approx(-11.0 - 4.5 / 4.0)


def test_what_cannot_be_met_has_no_solution() -> None:
    program = Program()
    row = program.row(low=2.0)
    program.column(1.0, {row: 1.0}, 1.0)
    assert program.solve() is None


def test_rows_and_costs_can_be_changed_afterwards() -> None:
    program = knapsack()
    row = program.row(low=1.0)
    program.add(2, row, 1.0)
    forced = program.solve()
    assert forced is not None
    assert forced.values[2] == 1.0
    program.bound_row(row, -math.inf, math.inf)
    program.recost({0: 1.0, 1: 1.0, 2: 1.0})
    nothing = program.solve()
    assert nothing is not None
    assert nothing.values == (0.0, 0.0, 0.0)
