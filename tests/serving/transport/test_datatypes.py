from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.errors import InputError
from gpuprof.serving.transport.datatypes import ITEM_BYTES, datatype_of, join_strings, split_strings, to_bytes, to_json

INTEGERS = [name for name in ITEM_BYTES if name.startswith(("INT", "UINT"))]


@pytest.mark.parametrize("datatype", INTEGERS)
def test_the_whole_range_of_an_integer_type_survives_and_nothing_beyond_is_taken(datatype: str) -> None:
    bits = 8 * ITEM_BYTES[datatype]
    low, high = (0, 2**bits - 1) if datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert to_json(to_bytes([low, 0, high], datatype), datatype, 3) == [low, 0, high]
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match="range"):
            to_bytes([value], datatype)


@pytest.mark.parametrize("datatype", INTEGERS)
def test_a_whole_number_that_is_written_as_a_float_is_one(datatype: str) -> None:
    assert to_json(to_bytes([1.0, 2, 0.0], datatype), datatype, 3) == [1, 2, 0]


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
def test_floats_survive_and_whole_numbers_are_floats_too(datatype: str) -> None:
    assert to_json(to_bytes([0.5, -2, 1], datatype), datatype, 3) == [0.5, -2.0, 1.0]


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("FP32", "1"),
        ("FP32", True),
        ("FP32", None),
        ("INT32", 1.5),
        ("INT32", float("inf")),
        ("INT8", True),
        ("BOOL", 2),
        ("BYTES", 1),
        ("FP64", [1]),
    ],
)
def test_a_value_of_another_kind_is_refused(datatype: str, value: object) -> None:
    with pytest.raises(ValueError, match="must hold"):
        to_bytes([value], datatype)


def test_bfloat16_travels_only_as_binary() -> None:
    with pytest.raises(ValueError, match="BF16"):
        to_bytes([1.0], "BF16")
    with pytest.raises(ValueError, match="BF16"):
        to_json(b"\x80\x3f", "BF16", 1)


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_strings_survive(strings: list[bytes]) -> None:
    assert split_strings(join_strings(strings), len(strings)) == strings


@given(st.binary(max_size=40), st.integers(0, 5))
def test_bytes_that_are_no_strings_are_refused_with_a_value_error(data: bytes, count: int) -> None:
    try:
        strings = split_strings(data, count)
    except ValueError:
        return
    assert join_strings(strings) == data


def test_a_type_that_the_protocol_lacks_is_said() -> None:
    assert datatype_of("tensor(float)", "x") == "FP32"
    with pytest.raises(InputError, match=r"tensor 'x' has type seq\(tensor\(float\)\)"):
        datatype_of("seq(tensor(float))", "x")
