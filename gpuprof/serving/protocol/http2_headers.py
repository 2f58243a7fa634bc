"""Headers of HTTP/2: those that come are read by the hpack package, those that go are written as they are.

Source: RFC 7541, sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable

import hpack

from gpuprof.serving.protocol.http2_frames import Http2Error, Problem

MAX_BLOCK_BYTES = 1 << 16
_MAX_KNOWN = 256
_INDEXED = 0x80
_ONE_BYTE = 0x7F


class HeaderReader:
    """Reads the header blocks of one connection, in order.

    Clients that send many like requests soon send nothing but indices into the table that both sides keep; such a block
    means the same until the table changes, and is then read once.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MAX_BLOCK_BYTES)
        self._known: dict[bytes, dict[bytes, bytes]] = {}

    def read(self, block: bytes) -> dict[bytes, bytes]:
        """Return the headers; of a name given twice the last.

        Raises
        ------
        Http2Error
            When they cannot be read, or are too many: the tables of both sides no longer agree.
        """
        headers = self._known.get(block)
        if headers is not None:
            return headers
        try:
            headers = {name: value for name, value in self._decoder.decode(block, raw=True)}  # noqa: C416
        except hpack.HPACKError as error:
            raise Http2Error(Problem.COMPRESSION_ERROR, f"the headers cannot be read: {error}") from None
        if min(block, default=0) < _INDEXED or len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        else:
            self._known[block] = headers
        return headers


def write_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a block of headers that leaves the other side's table alone."""
    return b"".join(b"\x00%b%b%b%b" % (_size(name), name, _size(value), value) for name, value in headers)


def _size(text: bytes) -> bytes:
    """Return the length of a text that is not Huffman-coded: 7 bits, and as many times 7 more as it takes."""
    left = len(text)
    if left < _ONE_BYTE:
        return bytes((left,))
    coded = bytearray((_ONE_BYTE,))
    left -= _ONE_BYTE
    while left > _ONE_BYTE:
        coded.append(left & _ONE_BYTE | 0x80)
        left >>= 7
    coded.append(left)
    return bytes(coded)
