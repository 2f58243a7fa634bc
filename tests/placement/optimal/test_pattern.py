from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.mig import is_legal
from gpuprof.domain.share import Share
from gpuprof.placement.contract import plain_device, sliced_device
from gpuprof.placement.optimal.pattern import PatternPacker, list_configurations

WHOLE = ("plain", None)


def test_the_contents_of_halves_and_quarters() -> None:
    contents = PatternPacker(WHOLE, (Share(25.0), Share(50.0), Share())).list_maximal()
    assert contents is not None
    assert {content.slots for content in contents} == {
        ((Share(100.0), 1),),
        ((Share(50.0), 2),),
        ((Share(50.0), 1), (Share(25.0), 2)),
        ((Share(25.0), 4),),
    }


@given(percents=st.lists(st.integers(4, 40).map(lambda n: 2.5 * n), min_size=1, max_size=4, unique=True))
def test_contents_are_within_the_whole_and_nothing_can_be_added(percents: list[float]) -> None:
    contents = PatternPacker(WHOLE, tuple(Share(percent) for percent in percents)).list_maximal()
    assert contents
    for content in contents:
        used = sum(share.sm_pct * count for share, count in content.slots)
        assert used <= 100.0 + 1e-9
        assert used + min(percents) > 100.0
    assert len({content.slots for content in contents}) == len(contents)


def test_too_many_contents_are_not_listed_and_the_first_ones_are_within_the_whole() -> None:
    packer = PatternPacker(WHOLE, tuple(Share(2.5 * n) for n in range(1, 41)))
    assert packer.list_maximal() is None
    for content in packer.initial_patterns():
        assert sum(share.sm_pct * count for share, count in content.slots) <= 100.0 + 1e-9


def test_nearly_equal_shares_by_the_dozen_do_not_take_for_ever() -> None:
    assert PatternPacker(WHOLE, tuple(Share(8.0 + 0.001 * n) for n in range(40))).list_maximal() is None


def test_the_best_content_is_that_of_the_greatest_worth() -> None:
    packer = PatternPacker(WHOLE, (Share(30.0), Share(50.0), Share(70.0)))
    content, value = packer.best_pattern({Share(30.0): 3.0, Share(50.0): 4.0, Share(70.0): 6.5})
    assert content.slots == ((Share(30.0), 1), (Share(70.0), 1))
    assert value == 9.5


def test_cuts_are_legal_layouts_of_the_instances_asked_for_and_the_whole() -> None:
    device = sliced_device()
    found = list_configurations(device, [Share(100.0, "3g.40gb"), Share(50.0, "1g.10gb"), Share(50.0)])
    assert all(is_legal(device, cut.layout) for cut in found)
    assert {item.profile.name for cut in found for item in cut.layout} == {"3g.40gb", "1g.10gb"}
    assert [cut.partitions() for cut in found if not cut.layout] == [{("sliced", None): 1}]


def test_a_device_without_mig_is_cut_in_no_other_way() -> None:
    assert [cut.layout for cut in list_configurations(plain_device(), [Share(50.0)])] == [()]
