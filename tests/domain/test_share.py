from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import read_neighbour
from gpuprof.domain.share import Share, parse_share
from gpuprof.errors import InputError


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


def test_the_message_names_the_value_that_broke_the_rule() -> None:
    with pytest.raises(InputError, match=r"above 0 and at most 100 percent but got 140"):
        Share(140.0)


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
    ],
)
def test_a_neighbour_is_a_model_with_or_without_its_batch_and_share(
    text: str, neighbour: tuple[str, int | None, Share | None]
) -> None:
    assert read_neighbour(text, device("a100-80")) == neighbour


def test_without_a_model_there_is_no_neighbour() -> None:
    with pytest.raises(InputError, match="cannot read the neighbour ''"):
        read_neighbour("", device("a100-80"))
