from __future__ import annotations

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.profiling.timeline.kernel_join import join_kernels

SHAPE = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")


def timeline(*runs: str) -> pd.DataFrame:
    """A kernel for each letter; capital letters have another grid."""
    letters = [(letter, repeat) for repeat, run in enumerate(runs) for letter in run]
    frame = _launches([letter for letter, _ in letters])
    frame["repeat"] = [repeat for _, repeat in letters]
    return frame.assign(start_ns=range(len(letters)), duration_ns=1)


def counted_launches(letters: str) -> pd.DataFrame:
    return _launches(list(letters)).assign(achieved_occupancy_pct=np.arange(len(letters), dtype=float))


def _launches(letters: list[str]) -> pd.DataFrame:
    frame = pd.DataFrame({"name": [f"void k{letter.lower()}(int, float*)" for letter in letters]})
    for name in SHAPE:
        frame[name] = [2 if name == "grid_x" and letter.isupper() else 1 for letter in letters]
    return frame


def test_the_same_kernels_in_the_same_order_match_one_by_one() -> None:
    joined, notes = join_kernels(timeline("aba"), counted_launches("aba"))
    assert joined["joined"].tolist() == ["both"] * 3
    assert joined["achieved_occupancy_pct"].tolist() == [0.0, 1.0, 2.0]
    assert notes == ()


def test_counters_of_one_run_stand_at_each_run() -> None:
    joined, _ = join_kernels(timeline("ab", "ab"), counted_launches("ab"))
    assert joined["achieved_occupancy_pct"].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_counters_of_as_many_runs_stand_each_at_its_own() -> None:
    joined, notes = join_kernels(timeline("ab", "ab"), counted_launches("abab"))
    assert joined["achieved_occupancy_pct"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert notes == ()


def test_a_kernel_with_another_launch_configuration_does_not_match() -> None:
    joined, notes = join_kernels(timeline("aB"), counted_launches("ab"))
    assert joined["joined"].tolist() == ["both", "timeline", "counters"]
    assert len(notes) == 2 and "1 kernels that the timeline has but no counter" in notes[0]
    assert np.isnan(joined["achieved_occupancy_pct"][1])


def test_what_only_one_of_them_has_is_kept_and_said() -> None:
    joined, notes = join_kernels(timeline("acb"), counted_launches("abd"))
    assert joined["joined"].tolist() == ["both", "timeline", "both", "counters"]
    assert "kc" in notes[0] and "kd" in notes[1]


def test_streams_that_launch_in_another_order_still_match() -> None:
    joined, notes = join_kernels(timeline("abcd"), counted_launches("cdab"))
    assert joined["achieved_occupancy_pct"].tolist() == [2.0, 3.0, 0.0, 1.0]
    assert notes == ()


def test_spaces_and_the_results_type_do_not_matter() -> None:
    kernels, counters = timeline("a"), counted_launches("a")
    kernels["name"] = ["void k<1, 2>(float *)"]
    counters["name"] = ["k<1,2>(float*)"]
    assert join_kernels(kernels, counters)[0]["joined"].tolist() == ["both"]


@given(st.text("abcAB", max_size=12), st.text("abcAB", max_size=12))
def test_nothing_is_lost_and_nothing_counted_twice(launched: str, counted_letters: str) -> None:
    if not launched and not counted_letters:
        return
    joined, _ = join_kernels(timeline(launched), counted_launches(counted_letters))
    assert (joined["joined"] != "counters").sum() == len(launched)
    assert (joined["joined"] != "timeline").sum() == len(counted_letters)
    common = sum(min(launched.count(letter), counted_letters.count(letter)) for letter in set(launched))
    assert (joined["joined"] == "both").sum() == common


def test_templates_match_although_two_tools_write_their_arguments_in_two_ways() -> None:
    kernels, counters = timeline("aba"), counted_launches("aba")
    traced = {
        "a": "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, std::array<char*, 3ul> >"
        "(int, at::native::AddFunctor<float>, std::array<char*, 3ul>)",
        "b": "void at::native::(anonymous namespace)::CatArray<128>(float*)",
    }
    replayed = {
        "a": "void at::native::vectorized_elementwise_kernel<(int)4, at::native::AddFunctor<float>, "
        "std::array<char *, (unsigned long)3>>(int, T2, T3)",
        "b": "void at::native::<unnamed>::CatArray<(int)128>(T1 *)",
    }
    joined, notes = join_kernels(
        kernels.assign(name=[traced[name[6]] for name in kernels["name"]]),
        counters.assign(name=[replayed[name[6]] for name in counters["name"]]),
    )
    assert joined["joined"].tolist() == ["both"] * 3 and notes == ()
    assert joined["achieved_occupancy_pct"].tolist() == [0.0, 1.0, 2.0]
