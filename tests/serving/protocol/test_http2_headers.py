"""Header blocks, against the encoder and decoder of the hpack package."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.protocol.http2_frames import Http2Error
from gpuprof.serving.protocol.http2_headers import HeaderReader, write_headers

NAMES = st.sampled_from([b":path", b"x-a", b"grpc-timeout", b"authorization"])
HEADERS = st.dictionaries(NAMES, st.binary(max_size=300), max_size=4)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.binary(max_size=20_000)), max_size=5))
def test_what_is_written_is_read_by_others(headers: list[tuple[bytes, bytes]]) -> None:
    decoder = hpack.Decoder(max_header_list_size=1 << 20)
    assert [tuple(pair) for pair in decoder.decode(write_headers(headers), raw=True)] == headers


@given(st.lists(HEADERS, max_size=12))
def test_blocks_of_one_connection_are_read_in_order_whatever_the_table_holds(blocks: list[dict[bytes, bytes]]) -> None:
    encoder, reader = hpack.Encoder(), HeaderReader()
    for block in [*blocks, *blocks]:
        assert reader.read(encoder.encode(list(block.items()))) == block


def test_a_block_of_indices_means_something_else_when_the_table_has_changed() -> None:
    encoder, reader = hpack.Encoder(), HeaderReader()
    for value in (b"first", b"first", b"second"):
        assert reader.read(encoder.encode([(b"x-a", value)])) == {b"x-a": value}
    newest = b"\xbe"  # index 62, the newest entry of the table
    assert reader.read(newest) == {b"x-a": b"second"}
    reader.read(encoder.encode([(b"x-a", b"third")]))
    assert reader.read(newest) == {b"x-a": b"third"}


@pytest.mark.parametrize("block", [b"\xff\xff\xff\xff", b"\x80", b"\x00\x05ab", b"\xfe"])
def test_blocks_that_make_no_sense_are_refused(block: bytes) -> None:
    with pytest.raises(Http2Error):
        HeaderReader().read(block)
