"""Maps of classes whose neighbours act through sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest

from gpuprof.placement.contract import evidence
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal import table_search
from gpuprof.placement.optimal.class_program import ClassProgram, DemandPart
from gpuprof.placement.optimal.class_search import ClassSearch
from gpuprof.placement.optimal.demand_classes import number_classes
from gpuprof.placement.optimal.kind_table import tabulate_kinds
from gpuprof.placement.optimal.table_pricing import make_table_pricing
from gpuprof.placement.optimal.table_search import TableSearch
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments
from tests.placement.optimal.test_neighbour_bound import problem


def cost(given: Problem, gpus: Sequence[PlacedGpu]) -> float:
    return sum(given.entry(gpu.device).price_per_hour for gpu in gpus)


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_map_from_tables_is_sound_serves_everybody_and_costs_no_more_than_a_quick_policys(
    seed: int, kinds: int
) -> None:
    given = problem(seed, kinds=kinds)
    segments = Segments(given)
    gpus = TableSearch(given, segments, tabulate_kinds(given, segments), Limit()).search()
    assert gpus is not None
    placement = Placement("optimal", gpus)
    assert check(to_map(given, placement), evidence(given)) == ()
    served = placement.rates_rps()
    assert all(served[one.model] == pytest.approx(one.rate_rps) for one in given.demands)
    quick = make_policy("igniter").place(given)
    assert quick.unplaced or cost(given, gpus) <= cost(given, quick.gpus) + 1e-9


def test_parts_that_are_priced_together_keep_their_slos_and_are_worth_more_than_asked_for_most_first() -> None:
    given = problem(3)
    segments, device = Segments(given), given.fleet.entries[0].device
    kind = tabulate_kinds(given, segments)[0]
    numbers = number_classes(given, segments)
    parts = [DemandPart(model, 4, pieces) for model in numbers for pieces in (1, 3)]
    worths = {part: part.fraction for part in parts}
    classes = [numbers[part.model] for part in parts]
    found = list(make_table_pricing(segments, device, kind, parts, classes).price(worths, 0.8, Limit()))
    assert any(len(one.parts) > 1 for one in found)
    assert [one.worth for one in found] == sorted((one.worth for one in found), reverse=True)
    for one in found:
        assert one.worth == pytest.approx(sum(worths[part] for part in one.parts)) and one.worth > 0.8
        rates = [given.demand(part.model).rate_rps * part.fraction for part in one.parts]
        pairs = zip(one.workloads, rates, strict=True)
        replicas = tuple(PlacedReplica(w.model, w.batch, w.processes, w.share, rate) for w, rate in pairs)
        assert sum(w.share.sm_pct for w in one.workloads) <= 100.0
        assert segments.holds(device, PlacedPartition(replicas))


def test_parts_of_every_split_serve_a_whole_demand_none_is_for_nothing_and_some_are_unequal() -> None:
    parts = [DemandPart("m", one.denominator, one.numerator) for one in (Fraction(n, 12) for n in range(1, 13))]
    splits = list(table_search._list_splits(parts, *table_search._COARSE))
    totals = [sum(map(_fraction, split)) for split in splits]
    assert all(
        total >= 1 and total - min(map(_fraction, split)) < 1 for total, split in zip(totals, splits, strict=True)
    )
    assert any(len(Counter(split)) > 1 for split in splits)


def _fraction(part: DemandPart) -> Fraction:
    return Fraction(part.pieces, part.divisor)


def test_classes_whose_neighbours_act_through_sums_are_searched_by_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(1)
    segments = Segments(given)
    monkeypatch.setattr(ClassSearch, "_search_partitions", lambda *_: pytest.fail("searched without tables"))
    assert ClassSearch(given, segments, Limit()).search([]) is not None


def test_the_relaxation_by_classes_leaves_time_for_patterns_of_whole_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    given, seconds = problem(0), list[float]()
    segments, generate = Segments(given), TableSearch._generate

    def note_limit(search: TableSearch, program: ClassProgram, limit: Limit, *, by_class: bool) -> ClassProgram:
        assert limit.seconds is not None
        seconds.extend((limit.seconds, limit.least_cpu_s))
        return generate(search, program, limit, by_class=by_class)

    monkeypatch.setattr(TableSearch, "_generate", note_limit)
    monkeypatch.setattr(table_search, "_LEAST_S", 60.0)
    TableSearch(given, segments, tabulate_kinds(given, segments), Limit(600.0)).search()
    by_class, least_by_class, whole, least_whole = seconds[:4]
    assert 0.0 < by_class < 0.75 * whole
    assert 0.0 < least_by_class < 0.75 * least_whole
