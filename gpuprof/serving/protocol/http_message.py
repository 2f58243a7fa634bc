"""Heads of HTTP requests, read by httptools, and of answers. Source: RFC 9112."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from http import HTTPStatus

import httptools

from gpuprof.serving.transport.inference import RefusedError, bad_request

CONTENT_JSON = b"application/json"
CONTENT_BINARY = b"application/octet-stream"
CONTENT_GRPC = b"application/grpc"
#: Content codings of request bodies; zlib detects the coding.
COMPRESSIONS = frozenset((b"gzip", b"x-gzip", b"deflate"))
JSON_LENGTH = b"inference-header-content-length"
#: Set by the edge: the client's address, and when its request began (seconds since 1970).
CLIENT_HEADER, ARRIVAL_HEADER = b"x-gpuprof-client", b"x-gpuprof-arrived"
_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
#: A proxy and this parser could read repetitions of these differently.
_GIVEN_ONCE = frozenset(
    (b"authorization", b"content-encoding", b"content-length", b"host", JSON_LENGTH, b"transfer-encoding")
)
#: Name, or address (IPv6 in brackets), and optional port (RFC 9110, 7.2; RFC 3986, 3.2.2).
_HOST = re.compile(rb"(\[[\w:.%~-]+\]|[\w.~%!$&'()*+,;=-]*)(:\d*)?")
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


@dataclass(slots=True)
class HttpHead:
    """Request line and headers."""

    method: bytes = b""
    target: bytes = b""
    #: Names in lower case; of a repeated name the last value.
    headers: dict[bytes, bytes] = field(default_factory=dict)
    length: int = 0  #: Content-Length; 0 when there is none.
    chunked: bool = False
    keep_alive: bool = True
    coding: bytes | None = None  #: Content coding of the body, in lower case; None: the body is not compressed.
    traceparent: str = ""
    repeated: bytes | None = None  #: A repeated header of `_GIVEN_ONCE`.
    is_complete: bool = False
    #: The parser's answer, valid only at the end of the headers.
    ask_keep_alive: Callable[[], bool] | None = field(default=None, repr=False, compare=False)

    @property
    def is_grpc(self) -> bool:
        """Return whether the request is a gRPC call translated by the edge: its body is a protobuf message."""
        return self.headers.get(b"content-type", b"").startswith(CONTENT_GRPC)

    def find_json_length(self, length: int) -> int:
        """Return the number of JSON bytes in a body of ``length``. Raises `RefusedError`: 400, if impossible."""
        text = self.headers.get(JSON_LENGTH)
        if text is None:
            return length
        size = _parse_number(text)
        if size is None or size > length:
            raise bad_request("Inference-Header-Content-Length must be a number and at most Content-Length")
        return size

    def on_url(self, url: bytes) -> None:
        """Append a part of the target; called by the parser."""
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; called by the parser."""
        name = name.lower()
        if name in self.headers and name in _GIVEN_ONCE:
            self.repeated = name
        self.headers[name] = value.rstrip(b" \t")

    def on_headers_complete(self) -> None:
        """Record the end of the headers; called by the parser."""
        self.is_complete = True
        if self.ask_keep_alive is not None:
            self.keep_alive, self.ask_keep_alive = self.ask_keep_alive(), None


class ChunkedBody:
    """Collects a body of unknown length, at most ``limit`` bytes.

    Attributes
    ----------
    data : bytearray
    is_complete : bool
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.data = bytearray()
        self.is_complete = False
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED_HEAD)

    def feed(self, data: bytes) -> None:
        """Parse received bytes. Raises `RefusedError`: 400 when they are no chunks, 413 beyond the limit."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise _explain_parser_error(error) from None

    def on_body(self, data: bytes) -> None:
        """Append a part of the body; called by the parser."""
        if len(self.data) + len(data) > self._limit:
            raise too_large_refusal(self._limit)
        self.data += data

    def on_message_complete(self) -> None:
        """Record the end of the body; called by the parser."""
        self.is_complete = True


def read_head(text: bytes) -> HttpHead:
    """Return the parsed head, blank line included.

    Raises
    ------
    RefusedError
        400, when the text is not HTTP.
    """
    head = HttpHead()
    parser = httptools.HttpRequestParser(head)
    head.ask_keep_alive = parser.should_keep_alive
    try:
        parser.feed_data(text)
    except httptools.HttpParserUpgrade:
        pass  # the offer to speak another protocol is not taken up
    except httptools.HttpParserError as error:
        raise _explain_parser_error(error) from None
    if not head.is_complete:
        raise bad_request("not HTTP: a request begins with a request line")
    if head.repeated is not None:
        raise bad_request(f"a request must have one header {head.repeated.decode().title()}")
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise RefusedError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "the server speaks HTTP/1.1")
    head.method = parser.get_method()
    _read_host(head, version)
    _read_framing(head)
    coding = head.headers.get(b"content-encoding", b"identity").lower()
    head.coding = None if coding == b"identity" else coding
    head.traceparent = head.headers.get(b"traceparent", b"").decode("latin-1")
    return head


def _read_host(head: HttpHead, version: str) -> None:
    """Check the Host header, or the authority of a target in absolute form (RFC 9112, 3.2.2)."""
    if version == "1.0":
        head.headers.pop(b"expect", None)  # RFC 9110, 10.1.1: such clients do not wait for 100 Continue
    elif b"host" not in head.headers:  # RFC 9112, 3.2
        raise bad_request("a request must have one header Host")
    for scheme in (b"http://", b"https://"):
        if head.target[: len(scheme)].lower() == scheme:
            authority, slash, rest = head.target[len(scheme) :].partition(b"/")
            head.headers[b"host"], head.target = authority, slash + rest if slash else b"/"
    if not _HOST.fullmatch(head.headers.get(b"host", b"")):
        raise bad_request("the header Host, or the address in its place, must be a name or an address, and a port")


def is_own_host(host: bytes, names: Collection[str]) -> bool:
    """Return whether a Host header is in ``names``, an address, or a name without a dot, impossible for web pages."""
    text = host.decode("latin-1").lower()
    name = text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0]
    if name in names or "." not in name.rstrip("."):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _read_framing(head: HttpHead) -> None:
    """Read the length of the body, or that it is chunked; the parser has refused heads with both (RFC 9112, 6.3)."""
    head.length = _parse_number(head.headers.get(b"content-length", b"0")) or 0
    coding = head.headers.get(b"transfer-encoding")
    head.chunked = coding is not None
    if coding is not None and coding.lower() != b"chunked":
        raise bad_request("a body must be chunked or have a Content-Length")


def _parse_number(text: bytes) -> int | None:
    """Return a header's number; None for anything else, and for a number of thousands of digits."""
    try:
        return int(text) if text.isdigit() else None
    except ValueError:
        return None


def _explain_parser_error(error: httptools.HttpParserError) -> RefusedError:
    """Return the refusal raised by a callback, or a refusal of a malformed message."""
    cause = error.__context__
    return cause if isinstance(cause, RefusedError) else bad_request(f"not HTTP: {error}")


def too_large_refusal(limit: int) -> RefusedError:
    """Return the refusal of a body of more than ``limit`` bytes."""
    return RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {limit} bytes")


def write_head(status: int, content_type: bytes, length: int, keep_alive: bool, extra: bytes = b"") -> bytes:
    """Return the head of an answer; ``extra``: further header lines, each with its line end."""
    closing = b"" if keep_alive else b"Connection: close\r\n"
    return b"%sContent-Type: %s\r\nContent-Length: %d\r\n%s%s\r\n" % (
        _STATUS_LINES[status],
        content_type,
        length,
        closing,
        extra,
    )


def refusal_headers(refusal: RefusedError) -> bytes:
    """Return the additional header lines of a refusal."""
    lines = b""
    if refusal.retry_after_s is not None:
        lines = b"Retry-After: %d\r\n" % max(1, round(refusal.retry_after_s))
    if refusal.allowed:
        lines += b"Allow: %s\r\n" % refusal.allowed.encode()
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        lines += b"WWW-Authenticate: Bearer\r\n"
    return lines
