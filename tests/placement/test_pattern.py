from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuprof.mig import is_legal
from gpuprof.placement.contract import plain_device, sliced_device
from gpuprof.placement.pattern import mig_patterns, packing_patterns
from gpuprof.share import Share


def test_the_patterns_of_halves_and_quarters() -> None:
    patterns = packing_patterns(plain_device(), [Share(25.0), Share(50.0), Share()])
    assert patterns is not None
    assert {pattern.slots for pattern in patterns} == {
        ((Share(100.0), 1),),
        ((Share(50.0), 2),),
        ((Share(50.0), 1), (Share(25.0), 2)),
        ((Share(25.0), 4),),
    }


@given(percents=st.lists(st.integers(4, 40).map(lambda n: 2.5 * n), min_size=1, max_size=4, unique=True))
def test_packings_are_within_the_whole_and_nothing_can_be_added(percents: list[float]) -> None:
    patterns = packing_patterns(plain_device(), [Share(percent) for percent in percents])
    assert patterns
    for pattern in patterns:
        used = sum(share.sm_pct * count for share, count in pattern.slots)
        assert used <= 100.0 + 1e-9
        assert used + min(percents) > 100.0
    assert len({pattern.slots for pattern in patterns}) == len(patterns)


def test_too_many_packings_are_not_listed() -> None:
    assert packing_patterns(plain_device(), [Share(2.5 * n) for n in range(1, 41)]) is None


def test_mig_patterns_are_legal_layouts_of_the_instances_asked_for() -> None:
    device = sliced_device()
    patterns = mig_patterns(device, [Share(100.0, "3g.40gb"), Share(100.0, "1g.10gb"), Share(50.0)])
    assert patterns
    assert all(is_legal(device, pattern.layout) for pattern in patterns)
    assert {item.profile.name for pattern in patterns for item in pattern.layout} == {"3g.40gb", "1g.10gb"}


def test_a_device_without_mig_has_no_such_patterns() -> None:
    assert mig_patterns(plain_device(), [Share(50.0)]) == ()
