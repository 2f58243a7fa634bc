from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import read_neighbour
from gpuprof.domain.share import Share, parse_share
from gpuprof.domain.sizes import (
    combine_sizes,
    describe_sizes,
    interpolate_sizes,
    mixed_name,
    name_parts,
    parse_dims,
    parse_mix,
    parse_sizes,
    sized_name,
    split_name,
)
from gpuprof.errors import InputError


def test_a_sweep_has_every_combination() -> None:
    assert combine_sizes({}) == ((),)
    assert combine_sizes(parse_dims(["seq=64,256", "height=8"])) == (
        (("height", 8), ("seq", 64)),
        (("height", 8), ("seq", 256)),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seq", "cannot read the dimension 'seq'.*NAME=SIZE"),
        ("seq=", "whole number from 1 to [0-9,]+ but got ''"),
        ("seq=0", "but got '0'"),
        ("seq=64,x", "but got 'x'"),
        ("=3", "cannot read the dimension"),
        ("seq=99999999999", "whole number"),
        ("seq=" + "9" * 5000, "but got 'one of 5000 characters'"),
    ],
)
def test_a_dimension_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_dims([text])


def test_a_dimension_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'seq' is given twice"):
        parse_dims(["seq=1", "seq=2"])
    with pytest.raises(InputError, match="2000 combinations"):
        combine_sizes({"a": range(1, 2001)})
    with pytest.raises(InputError, match=r"from 1 to [0-9,]+ but got 0"):
        combine_sizes({"a": (0,)})


def test_a_distribution_is_taken_in_proportion_and_may_leave_out_the_name() -> None:
    mix = parse_mix("seq=64:7|256:3")
    assert mix.parts == (((("seq", 64),), 0.7), ((("seq", 256),), 0.3))
    assert str(mix) == "seq=64:0.7|seq=256:0.3"
    assert parse_mix(str(mix)) == mix


def test_one_size_is_a_distribution_of_one_part_and_an_axis_is_no_part() -> None:
    assert parse_mix("seq=128").parts == (((("seq", 128),), 1.0),)
    assert parse_mix("x:1=128").parts == (((("x:1", 128),), 1.0),)
    assert parse_mix("x:1=64:0.5|x:1=128:0.5").parts[1] == ((("x:1", 128),), 0.5)
    assert str(parse_mix("width=2,height=1")) == "height=1,width=2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot read the sizes"),
        ("128", "cannot read the sizes"),
        ("seq=64|seq=128", "does not say how many requests have seq=64"),
        ("seq=64:0|seq=128:1", "positive number but got '0'"),
        ("seq=64:x", "positive number but got 'x'"),
        ("seq=64:1|width=3:1", "same dimensions"),
        ("seq=64:1|seq=64:1", "twice"),
        ("seq=1,seq=2", "two sizes"),
    ],
)
def test_a_distribution_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_mix(text)


@given(
    st.dictionaries(st.from_regex(r"[a-z_]+(:[0-9])?", fullmatch=True), st.integers(1, 10**6), min_size=1, max_size=3)
)
def test_names_with_sizes_are_read_back(sizes: dict[str, int]) -> None:
    pairs = tuple(sorted(sizes.items()))
    assert parse_sizes(describe_sizes(pairs)) == pairs
    assert split_name(sized_name("dir/bert.onnx", pairs)) == ("dir/bert.onnx", pairs)


def test_sizes_between_measured_ones_are_on_the_line_between_the_nearest() -> None:
    measured = [(("seq", size),) for size in (32, 64, 128, 256)]
    assert interpolate_sizes(measured, (("seq", 96),)) == {(("seq", 64),): 0.5, (("seq", 128),): 0.5}
    assert interpolate_sizes(measured, (("seq", 64),)) == {(("seq", 64),): 1.0}
    assert interpolate_sizes(measured, (("seq", 512),)) is None
    assert interpolate_sizes(measured, (("seq", 16),)) is None
    assert interpolate_sizes([], (("seq", 16),)) is None
    assert interpolate_sizes([(("other", 1),)], (("seq", 16),)) is None


@given(st.integers(1, 400), st.integers(1, 400))
def test_two_dimensions_are_blended_exactly_where_the_time_is_linear_in_both(height: int, width: int) -> None:
    measured = [(("height", h), ("width", w)) for h in (1, 100, 400) for w in (1, 50, 400)]
    blended = interpolate_sizes(measured, (("height", height), ("width", width)))
    assert blended is not None
    assert sum(blended.values()) == pytest.approx(1.0)
    mean = {name: sum(part * dict(sizes)[name] for sizes, part in blended.items()) for name in ("height", "width")}
    assert mean == {"height": pytest.approx(height), "width": pytest.approx(width)}


def test_a_name_with_a_distribution_falls_into_names_with_sizes() -> None:
    name = mixed_name("bert", "seq=64:0.7|256:0.3")
    assert name == "bert[seq=64:0.7|seq=256:0.3]"
    assert name_parts(name) == (("bert[seq=64]", 0.7), ("bert[seq=256]", 0.3))
    assert name_parts("bert[seq=64]") == (("bert[seq=64]", 1.0),)
    assert name_parts("bert") == (("bert", 1.0),)
    assert mixed_name("bert", None) == "bert"


@pytest.mark.parametrize("wrong", ["16", 16.0, True, 0, (), (8, "16"), None])
def test_sizes_from_python_are_one_whole_number_or_several(wrong: object) -> None:
    int_of_numpy: Any = np.int64(16)
    assert combine_sizes({"seq": 16}) == combine_sizes({"seq": (16,)}) == combine_sizes({"seq": int_of_numpy})
    with pytest.raises(InputError, match="'seq'"):
        combine_sizes({"seq": wrong})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("text", "units", "share"),
    [
        ("50", 108, Share(50.0)),
        ("2.5%", 108, Share(2.5)),
        (" 100 % ", 1, Share(100.0)),
        ("1core", 2, Share(50.0)),
        ("0.5cores", 2, Share(25.0)),
        ("2 cores", 2, Share(100.0)),
        ("3g.40gb", 108, Share(100.0, "3g.40gb")),
        ("1g.10gb+me:30", 108, Share(30.0, "1g.10gb+me")),
    ],
)
def test_every_written_form_is_read(text: str, units: int, share: Share) -> None:
    assert parse_share(text, units) == share


@pytest.mark.parametrize(
    "text", ["", "half", "-5", "0", "100.1", "nan", "0cores", "3cores", "3g:40", "1e2", "3g.40gb:0"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_share(text, 2)


@given(st.floats(0.01, 100.0), st.sampled_from([None, "1g.10gb", "7g.80gb"]))
def test_what_is_printed_is_read_back_to_the_digits_printed(pct: float, mig: str | None) -> None:
    share = Share(float(f"{pct:g}"), mig)
    assert parse_share(str(share), 8) == share


def test_only_all_of_a_device_without_mig_is_whole() -> None:
    assert Share().is_whole
    assert not Share(99.0).is_whole
    assert not Share(100.0, "7g.80gb").is_whole


@pytest.mark.parametrize(
    ("text", "neighbour"),
    [
        ("net", ("net", None, None)),
        ("net@4", ("net", 4, None)),
        ("net:4", ("net", 4, None)),
        ("folder/net.onnx@4:50%", ("folder/net.onnx", 4, Share(50.0))),
        ("net[seq=128]@2:25", ("net[seq=128]", 2, Share(25.0))),
        ("net@4:3g.40gb:50", ("net", 4, Share(50.0, "3g.40gb"))),
    ],
)
def test_a_neighbour_is_a_model_with_or_without_its_batch_and_share(
    text: str, neighbour: tuple[str, int | None, Share | None]
) -> None:
    assert read_neighbour(text, device("a100-80")) == neighbour


def test_without_a_model_there_is_no_neighbour() -> None:
    with pytest.raises(InputError, match="cannot read the neighbour ''"):
        read_neighbour("", device("a100-80"))
