"""Compressed bodies of requests."""

from __future__ import annotations

import zlib
from http import HTTPStatus

from gpuprof.serving.transport.inference import RefusedError, bad_request
from gpuprof.serving.transport.wire import Buffer


def is_compressed(message: Buffer) -> bool:
    """Return whether a message begins as gzip or zlib do; neither JSON nor a ModelInferRequest does."""
    beginning = bytes(message[:2])
    if beginning == b"\x1f\x8b":
        return True
    # RFC 1950, 2.2: Deflate with a 32 KiB window, and both bytes as a number are a multiple of 31.
    return beginning[:1] == b"\x78" and len(beginning) > 1 and int.from_bytes(beginning, "big") % 31 == 0


def inflate(message: Buffer, limit: int) -> bytes:
    """Return the decompressed message of at most ``limit`` bytes. Raises `RefusedError`: 400, 413."""
    inflater = zlib.decompressobj(zlib.MAX_WBITS + 32)  # recognises the header of gzip or zlib (zlib.h, inflateInit2)
    try:
        inflated = inflater.decompress(message, limit + 1)
    except zlib.error as error:
        raise bad_request(f"the message cannot be inflated: {error}") from None
    if len(inflated) > limit:
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the message is larger than {limit} bytes")
    if not inflater.eof or inflater.unused_data:
        raise bad_request("the message is not compressed as one piece")
    return inflated
