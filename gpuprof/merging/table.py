"""A table of pairs of values by the cells that they lie in, filled and asked by compiled loops.

Hundreds of millions of lookups into a table that no cache holds are what comparing two models costs, so this is
the one place where NumPy's temporaries are too slow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpuprof.machine.machine_code import compile_function
from gpuprof.merging.submatrix import Matrix

Index = npt.NDArray[np.int64]

#: Cells are this many tolerances wide. Wider ones have fewer values near their borders, each to be looked up twice;
#: in narrower ones fewer pairs meet by chance, by the square: of a hundred million weights, one million instead of
#: fourteen at a width of thirty-two.
CELLS_PER_TOLERANCE = 8
#: How near a border is near: one tolerance and a little for the rounding of the division.
REACH = 1.001 / CELLS_PER_TOLERANCE
#: Pairs whose places are computed before any is looked up: lookups that follow one another do not wait for memory.
_BLOCK = 512
_SMALLEST_BITS, _LARGEST_BITS = 12, 30


class _Cells(NamedTuple):
    """How a pair of values becomes a place in the table."""

    scale: float  #: One over the width of a cell.
    shift: Any  #: Of the hash, so that what is left indexes the table; uint64 as the salt.
    salt: Any


class PairTable:
    """Which pairs of cells have been entered; a hash without chains, so some that were not seem to be.

    ``entries``: how many pairs will be entered, about; ``salt``: tables of different salts confuse different pairs.
    """

    def __init__(self, entries: int, tolerance: float, salt: int) -> None:
        bits = min(_LARGEST_BITS, max(_SMALLEST_BITS, entries.bit_length() + 3))
        self._table = np.zeros(1 << bits, np.uint8)
        self._cells = _Cells(1.0 / (CELLS_PER_TOLERANCE * tolerance), np.uint64(64 - bits), np.uint64(salt))

    def enter(self, matrix: Matrix, step: int, at: Index, both_sides: bool = False) -> None:
        """Enter the pairs (entry, entry ``step`` further) at flat positions ``at``, if asked in all cells near them."""
        _enter(matrix.reshape(-1), step, at, both_sides, self._cells, self._table)

    def find(self, matrix: Matrix, step: int, at: Index, both_sides: bool = True) -> Index:
        """Return which of the pairs at ``at`` were entered, or, if ``both_sides``, may agree with one that was."""
        hit = np.zeros(len(at), np.uint8)
        _ask(matrix.reshape(-1), step, at, both_sides, self._cells, self._table, hit)
        return at[hit.view(np.bool_)]


def _slot_of(first: int, second: int, shift: Any, salt: Any) -> Any:
    mixed = np.uint64(first) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(second)
    mixed ^= (mixed >> np.uint64(29)) ^ salt
    mixed *= np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(32)
    return (mixed * np.uint64(0x9E3779B97F4A7C15)) >> shift


def _border(scaled: float, cell: float) -> int:
    within = scaled - cell
    if within > 1.0 - REACH:
        return 1
    return -1 if within < REACH else 0


def _slots_of(flat: Matrix, step: int, at: Index, both: bool, cells: _Cells, slots: Any, owners: Any) -> int:
    """Write the slots of the pairs at ``at``, then those of their other cells near borders; return how many."""
    count, scale, shift, salt = len(at), cells.scale, cells.shift, cells.salt
    for k in range(len(at)):
        one, two = np.float64(flat[at[k]]) * scale, np.float64(flat[at[k] + step]) * scale
        cell_one, cell_two = np.floor(one), np.floor(two)
        first, second = np.int64(cell_one), np.int64(cell_two)
        slots[k], owners[k] = _slot(first, second, shift, salt), k
        if both:
            beside, beyond = _near(one, cell_one), _near(two, cell_two)
            # Written in any case and kept only if there is such a cell: cheaper than branches that nobody foresees.
            slots[count], owners[count] = _slot(first + beside, second, shift, salt), k
            count += beside != 0
            slots[count], owners[count] = _slot(first, second + beyond, shift, salt), k
            count += beyond != 0
            if beside != 0 and beyond != 0:
                slots[count], owners[count] = _slot(first + beside, second + beyond, shift, salt), k
                count += 1
    return count


def _enter_pairs(flat: Matrix, step: int, at: Index, both: bool, cells: _Cells, table: Any) -> None:
    slots, owners = np.empty(4 * _BLOCK + 2, np.uint64), np.empty(4 * _BLOCK + 2, np.int64)
    for begin in range(0, len(at), _BLOCK):
        count = _slots(flat, step, at[begin : begin + _BLOCK], both, cells, slots, owners)
        for k in range(count):
            table[slots[k]] = 1


def _ask_pairs(flat: Matrix, step: int, at: Index, both: bool, cells: _Cells, table: Any, hit: Any) -> None:
    slots, owners = np.empty(4 * _BLOCK + 2, np.uint64), np.empty(4 * _BLOCK + 2, np.int64)
    for begin in range(0, len(at), _BLOCK):
        count = _slots(flat, step, at[begin : begin + _BLOCK], both, cells, slots, owners)
        for k in range(count):
            hit[begin + owners[k]] |= table[slots[k]]


_slot: Any = compile_function(_slot_of, nogil=True)
_near: Any = compile_function(_border, nogil=True)
_slots: Any = compile_function(_slots_of, nogil=True)
_enter: Any = compile_function(_enter_pairs, nogil=True)
_ask: Any = compile_function(_ask_pairs, nogil=True)
