"""Boxes of devices, by the number of their replicas and what these press."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
import pytest

from gpuprof.domain.estimate import Workload
from gpuprof.domain.interference_table import Floats, Integers
from gpuprof.domain.share import Share
from gpuprof.placement.optimal.neighbour_box import PIECES, DualPrices, KindTable, PressureBox, root_boxes

SPACE, MOST, CLASSES = 6, 4, 2


@dataclass(frozen=True, slots=True)
class CrowdedTable:
    """Each replica more slows all of them down by a tenth, each unit that others press by a twentieth."""

    alone_ms: Floats
    pressures: Floats

    def take(self, rows: Integers) -> CrowdedTable:
        return CrowdedTable(self.alone_ms[rows], self.pressures[rows])

    def least_times_ms(self, count: int, totals: Floats) -> tuple[Floats, Floats]:
        others = np.maximum(totals[0] - self.pressures[:, 0], 0.0)
        times = self.alone_ms * (1.0 + 0.1 * (count - 1) + 0.05 * others)
        return times, times


def make_kind(seed: int, workloads: int = 24) -> KindTable:
    draw = np.random.default_rng(seed)
    sizes = np.sort(draw.integers(1, SPACE + 1, workloads))
    classes = draw.integers(0, CLASSES, workloads)
    return KindTable(
        price=1.0,
        workloads=[Workload("m", 1, Share(100.0 * size / SPACE)) for size in sizes],
        table=CrowdedTable(draw.uniform(5.0, 20.0, workloads), draw.integers(1, 6, (workloads, 2)).astype(float)),
        sizes=sizes,
        space=SPACE,
        classes=classes,
        requests=draw.integers(1, 9, workloads).astype(float),
        budgets_ms=np.full(workloads, 30.0),
        rates_rps=np.array([300.0, 500.0])[classes],
        most=MOST,
    )


def draw_prices(seed: int) -> DualPrices:
    draw = np.random.default_rng(seed)
    of_pieces = np.sort(draw.uniform(0.0, 0.5, (CLASSES, PIECES + 1)), axis=1)
    of_pieces[:, 0] = 0.0
    return DualPrices(draw.uniform(0.0, 2e-3, CLASSES), of_pieces)


def find_most(box: PressureBox, worths: DualPrices) -> float:
    """Return what the devices of a box are worth at most, of all that fit, at the box's rates."""
    kind, most = box.kind, -np.inf
    worth = worths.of_workloads(box, np.arange(len(kind.sizes)))
    for count in range(box.count, box.most + 1):
        for items in combinations_with_replacement(np.flatnonzero(box.rates > 0.0).tolist(), count):
            fits = kind.sizes[list(items)].sum() <= SPACE
            if fits and np.all(kind.sum_pressures(items) <= box.high):
                most = max(most, float(worth[list(items)].sum()))
    return most


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("end", [np.inf, 9.0])
def test_a_box_is_worth_what_the_best_of_its_devices_is_though_most_workloads_are_left_out(
    seed: int, end: float
) -> None:
    kind, worths = make_kind(seed), draw_prices(seed)
    for count, most in ((1, 1), (2, 2), (3, MOST)):
        box = PressureBox(kind, count, most, np.array([2.0, 0.0]), np.array([end, np.inf]), np.zeros(2))
        box.evaluate(worths, 0.0)
        assert box.value == pytest.approx(max(0.0, find_most(box, worths)))


def test_a_box_of_any_more_replicas_is_cut_where_more_of_them_are_slower_and_holds_all_devices_as_before() -> None:
    kind = make_kind(0)
    *_, box = root_boxes(kind, (1, 2))
    smallest = int(np.argmin(kind.sizes))
    crowded, few = (smallest,) * MOST, (smallest,) * 2
    assert box.split(crowded)
    first, second = box.halves
    assert (first.count, second.most) == (2, MOST) and second.count == first.most + 1
    assert box.find(crowded) is second and box.find(few) is first
    assert np.all(second.rates <= first.rates) and np.any(second.rates < first.rates)
