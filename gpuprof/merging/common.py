"""The longest common submatrix of pairs from two lists of matrices, each by the fastest applicable search."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from gpuprof.merging.lattice import distinct_values, is_lattice, lattice_block
from gpuprof.merging.seeds import Matches, Pool, neighbour_matches
from gpuprof.merging.submatrix import (
    EMPTY,
    TOLERANCE,
    CommonBlock,
    Matrix,
    block_at,
    choose_larger,
    displacement_work,
    exhaustive_block,
    most_possible,
    same_entries,
)

Pair = tuple[int, int]
#: Flat positions in order of their values, and the values.
_Ordered = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]

#: Comparisons up to which all displacements are tried at once; and up to which they are where the search was cut short.
_SMALL_WORK, _BEARABLE_WORK = 2**16, 2**22
#: Displacements looked at for one pair of matrices; more only come up where values repeat.
_MOST_DISPLACEMENTS, _MOST_WORK = 512, 2**27
#: Entries that are looked at before a whole matrix is.
_SAMPLE = 4096
#: Entries of each of two trained matrices, one of which is nearly always in both.
_FEW_ENTRIES = 2**15
#: With more distinct values neighbours rarely agree by chance.
_FEW_VALUES = 2**12


def common_blocks(
    first: Sequence[Matrix], second: Sequence[Matrix], pairs: Iterable[Pair] | None = None, tolerance: float = TOLERANCE
) -> dict[Pair, CommonBlock]:
    """Return the longest common submatrix for pairs (position in ``first``, position in ``second``).

    Parameters
    ----------
    first, second : sequence of ndarray, shape (rows, columns)
        Integers agree only when equal; floats when they differ by at most ``tolerance``, those of 16 bits in float32.
    pairs : iterable of (int, int) or None
        Which pairs; None means all.
    """
    wanted = [(i, j) for i in range(len(first)) for j in range(len(second))] if pairs is None else list(pairs)
    search = _Search([_prepare_matrix(m) for m in first], [_prepare_matrix(m) for m in second], tolerance)
    return search.run(wanted)


def _prepare_matrix(matrix: Matrix) -> Matrix:
    if matrix.dtype.kind == "f" and matrix.dtype.itemsize > 2:
        return np.ascontiguousarray(matrix)
    if matrix.dtype.kind in "iub":
        return np.ascontiguousarray(matrix, np.int64)
    return np.ascontiguousarray(matrix, np.float32)


@dataclass(slots=True)
class _Candidates:
    """Candidates from common neighbours: displacements where more than two entries agree, counts, and one pair."""

    larger: dict[tuple[int, int], int] = field(default_factory=dict)
    two: CommonBlock = EMPTY

    def add(self, other: _Candidates) -> None:
        """Add the candidates from other neighbours."""
        for displacement, count in other.larger.items():
            if displacement in self.larger or len(self.larger) <= 4 * _MOST_DISPLACEMENTS:
                self.larger[displacement] = self.larger.get(displacement, 0) + count
        self.two = choose_larger(self.two, other.two)


class _Search:
    """One run of `common_blocks`: distinct matrices, and the best block found for each pair of them."""

    def __init__(self, first: Sequence[Matrix], second: Sequence[Matrix], tolerance: float) -> None:
        self._tolerance = tolerance
        self._known: dict[str, int] = {}
        self.matrices: list[Matrix] = []
        self._first = [self._add_matrix(matrix) for matrix in first]
        self._second = [self._add_matrix(matrix) for matrix in second]
        self._values: dict[int, npt.NDArray[np.float64] | None] = {}
        self._sorted: dict[tuple[int, int], _Ordered] = {}
        self.best: dict[Pair, CommonBlock] = {}

    def run(self, wanted: Sequence[Pair]) -> dict[Pair, CommonBlock]:
        """Return the largest common block of each wanted pair."""
        distinct = {self._distinct(i, j) for i, j in wanted}
        left = sorted(pair for pair in distinct if not self._solve_trivial_pair(pair))
        self._search_pool(left)
        blocks = {}
        for i, j in wanted:
            a, b = self._first[i], self._second[j]
            blocks[i, j] = self.best[a, b] if (a, b) == self._distinct(i, j) else self.best[b, a].swap()
        return blocks

    def _add_matrix(self, matrix: Matrix) -> int:
        digest = hashlib.blake2b(matrix.view(np.uint8).data if matrix.size else b"", digest_size=16).hexdigest()
        key = f"{matrix.dtype}{matrix.shape}{digest}"
        if key not in self._known:
            self._known[key] = len(self.matrices)
            self.matrices.append(matrix)
        return self._known[key]

    def _distinct(self, i: int, j: int) -> Pair:
        a, b = self._first[i], self._second[j]
        return (a, b) if a <= b else (b, a)

    def _solve_trivial_pair(self, pair: Pair) -> bool:
        """Solve a pair without a search over all matrices, if possible; return whether it was."""
        a, b = (self.matrices[i] for i in pair)
        known = self._find_without_displacement(pair)
        self.best[pair] = known
        if known.area == most_possible(a, b):
            return True
        if displacement_work(a, b) <= _SMALL_WORK:
            self.best[pair] = exhaustive_block(a, b, self._tolerance, known)
            return True
        if self._is_lattice(pair) and not self._is_pool_search_faster(pair):
            self.best[pair] = lattice_block(a, b, known, self._tolerance)
            return True
        return False

    def _find_without_displacement(self, pair: Pair) -> CommonBlock:
        """Return the common block without a displacement, where a sample says that there is one worth computing."""
        a, b = (self.matrices[i] for i in pair)
        if pair[0] == pair[1] and a.dtype.kind != "f":
            return CommonBlock(*a.shape)
        if a.shape != b.shape:
            return EMPTY
        step = max(1, a.size // _SAMPLE)
        sampled = [m.ravel()[::step][None, :] for m in (a, b)]
        if not same_entries(sampled[0], sampled[1], self._tolerance).any():
            return EMPTY
        return block_at(a, b, 0, 0, self._tolerance)

    def _is_pool_search_faster(self, pair: Pair) -> bool:
        """Return whether neighbours rarely agree by chance: then searching all matrices at once is faster."""
        return all(len(values) > _FEW_VALUES for i in pair if (values := self._values[i]) is not None)

    def _is_lattice(self, pair: Pair) -> bool:
        values = []
        for i in pair:
            if i not in self._values:
                self._values[i] = distinct_values(self.matrices[i])
            values.append(self._values[i])
        return values[0] is not None and values[1] is not None and is_lattice(values[0], values[1], self._tolerance)

    def _search_pool(self, remaining: Sequence[Pair]) -> None:
        if not remaining:
            return
        used = sorted({i for pair in remaining for i in pair})
        place = {index: position for position, index in enumerate(used)}
        asks, answers = [False] * len(used), [False] * len(used)
        for a, b in remaining:
            answers[place[a]] = asks[place[b]] = True
        pool = Pool([self.matrices[i] for i in used], asks, answers, self._tolerance)
        open_pairs = {(place[a], place[b]): (a, b) for a, b in remaining}
        # Side by side and one above the other are independent; NumPy lets both cores work.
        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(lambda down: self._displacements(pool, open_pairs, down), (False, True)))
        for pair in remaining:
            candidates = _Candidates()
            for part, _ in both:
                candidates.add(part.get(pair, _Candidates()))
            self._grow_candidates(pair, candidates, any(pair in cut for _, cut in both))

    def _displacements(
        self, pool: Pool, open_pairs: dict[Pair, Pair], down: bool
    ) -> tuple[dict[Pair, _Candidates], set[Pair]]:
        """Return the candidates of each pair from common neighbours, and the pairs whose search was truncated."""
        candidates: dict[Pair, _Candidates] = {}
        cut: set[Pair] = set()
        for matches in neighbour_matches(pool, down):
            for i, j in matches.unfinished:
                cut |= {open_pairs[key] for key in ((i, j), (j, i)) if key in open_pairs}
            for key, chosen in _split_by_pair(matches, len(pool.matrices)):
                ahead, behind = matches.first_at[chosen], matches.second_at[chosen]
                if key not in open_pairs:
                    key, ahead, behind = (key[1], key[0]), behind, ahead
                if key in open_pairs:
                    pair = open_pairs[key]
                    candidates.setdefault(pair, _Candidates()).add(self._verify_matches(pair, ahead, behind, down))
        return candidates, cut

    def _verify_matches(
        self, pair: Pair, at_a: npt.NDArray[np.int64], at_b: npt.NDArray[np.int64], down: bool
    ) -> _Candidates:
        a, b = (self.matrices[i] for i in pair)
        rows_a, columns_a = np.divmod(at_a, a.shape[1])
        rows_b, columns_b = np.divmod(at_b, b.shape[1])
        step = (1, 0) if down else (0, 1)

        def agree(row: int, column: int) -> npt.NDArray[np.bool_]:
            ra, ca, rb, cb = rows_a + row, columns_a + column, rows_b + row, columns_b + column
            inside = (ra >= 0) & (rb >= 0) & (ca >= 0) & (cb >= 0)
            inside &= (ra < a.shape[0]) & (rb < b.shape[0]) & (ca < a.shape[1]) & (cb < b.shape[1])
            same = np.zeros(len(ra), np.bool_)
            same[inside] = same_entries(a[ra[inside], ca[inside]], b[rb[inside], cb[inside]], self._tolerance)
            return same

        true = agree(0, 0) & agree(*step)
        rows_a, columns_a, rows_b, columns_b = (x[true] for x in (rows_a, columns_a, rows_b, columns_b))
        along = agree(-step[0], -step[1]) | agree(2 * step[0], 2 * step[1])
        side = (step[1], step[0])
        beside = agree(*side) & agree(step[0] + side[0], step[1] + side[1])
        beside |= agree(-side[0], -side[1]) & agree(step[0] - side[0], step[1] - side[1])
        more = along | beside
        candidates = _Candidates()
        if len(true_rows := np.flatnonzero(~more)):
            k = true_rows[0]
            rows, columns = (2, 1) if down else (1, 2)
            corners = [int(x[k]) for x in (rows_a, columns_a, rows_b, columns_b)]
            candidates.two = CommonBlock(rows, columns, corners[0], corners[1], corners[2], corners[3])
        # One number for both displacements: the second, raised by a's width, is from 1 to below the span.
        span = a.shape[1] + b.shape[1]
        code = (rows_b - rows_a)[more] * span + (columns_b - columns_a)[more] + a.shape[1]
        codes, counts = np.unique(code, return_counts=True)
        most = np.argsort(-counts, kind="stable")[: _MOST_DISPLACEMENTS + 1]
        for at, count in zip(codes[most], counts[most], strict=True):
            down_by, right_by = divmod(int(at), span)
            candidates.larger[down_by, right_by - a.shape[1]] = int(count)
        return candidates

    def _grow_candidates(self, pair: Pair, candidates: _Candidates, cut: bool) -> None:
        a, b = (self.matrices[i] for i in pair)
        best = choose_larger(self.best[pair], candidates.two)
        most = min(_MOST_DISPLACEMENTS, max(16, _MOST_WORK // a.size))
        promising = sorted(candidates.larger, key=lambda displacement: (-candidates.larger[displacement], displacement))
        for down, right in promising[:most]:
            best = choose_larger(best, block_at(a, b, down, right, self._tolerance))
        if best.area == 0:
            best = self._find_single_entry(pair)
        exact = not cut and len(promising) <= most
        if not exact and displacement_work(a, b) <= _BEARABLE_WORK:
            best, exact = exhaustive_block(a, b, self._tolerance, best), True
        if not exact and self._is_lattice(pair):
            best, exact = lattice_block(a, b, best, self._tolerance), True
        self.best[pair] = replace(best, exact=exact)

    def _find_single_entry(self, pair: Pair) -> CommonBlock:
        a, b = (self.matrices[i] for i in pair)
        part = _find_shared_entry(
            self._order_entries(pair[0], _FEW_ENTRIES), a, b.ravel()[:_FEW_ENTRIES], b, self._tolerance
        )
        return (
            part or _find_shared_entry(self._order_entries(pair[0], a.size), a, b.ravel(), b, self._tolerance) or EMPTY
        )

    def _order_entries(self, index: int, entries: int) -> _Ordered:
        if (index, entries) not in self._sorted:
            flat = self.matrices[index].ravel()[:entries]
            order = np.argsort(flat)
            self._sorted[index, entries] = order, flat[order].astype(np.float64)
        return self._sorted[index, entries]


def _find_shared_entry(entries: _Ordered, a: Matrix, flat: Matrix, b: Matrix, tolerance: float) -> CommonBlock | None:
    """Return one of the ordered entries of ``a`` that is among those of ``b`` in ``flat``."""
    order, ordered = entries
    for begin in range(0, len(flat), _SAMPLE):
        part = flat[begin : begin + _SAMPLE].astype(np.float64)
        at = np.minimum(np.searchsorted(ordered, part - tolerance), len(ordered) - 1)
        hit = np.flatnonzero(np.abs(ordered[at] - part) <= tolerance)
        if len(hit):
            a_row, a_column = divmod(int(order[at[hit[0]]]), a.shape[1])
            b_row, b_column = divmod(begin + int(hit[0]), b.shape[1])
            return CommonBlock(1, 1, a_row, a_column, b_row, b_column)
    return None


def _split_by_pair(matches: Matches, count: int) -> Iterator[tuple[Pair, npt.NDArray[np.int64]]]:
    code = matches.first * count + matches.second
    order = np.argsort(code, kind="stable")
    starts = np.flatnonzero(np.diff(code[order], prepend=-1))
    for chosen in np.split(order, starts[1:]) if len(order) else []:
        yield (int(matches.first[chosen[0]]), int(matches.second[chosen[0]])), chosen
