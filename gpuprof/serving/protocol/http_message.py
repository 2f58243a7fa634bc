"""HTTP messages, read by httptools (source: RFC 9112), their routes, and the interface of their clients."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

import httptools
import orjson

from gpuprof.serving.router.infer_request import RequestBody
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import RefusedError, bad_request
from gpuprof.serving.transport.wire import Buffer

CONTENT_JSON = b"application/json"
CONTENT_BINARY = b"application/octet-stream"
CONTENT_GRPC = b"application/grpc"
#: Content codings of request bodies; zlib detects the coding.
COMPRESSIONS = frozenset((b"gzip", b"x-gzip", b"deflate"))
JSON_LENGTH = b"inference-header-content-length"
#: Set by the edge: the client's address, and when its request began (seconds since 1970).
CLIENT_HEADER, ARRIVAL_HEADER = b"x-gpuprof-client", b"x-gpuprof-arrived"
_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
#: Largest unneeded body that is received and dropped, which costs less than a new connection.
MAX_DISCARDED_BYTES = 1 << 24
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
        self.headers[name.lower()] = value.rstrip(b" \t")


class HttpClient(Protocol):
    """The client of a request; exactly one of its methods is called, once."""

    on_disconnect: Callable[[], None] | None  #: Called when the client disconnects before the answer.
    peer: str  #: The client's address.

    def respond(
        self,
        status: int,
        content_type: bytes,
        body: Buffer,
        tail: list[Buffer] | None = None,
        slot: Slot | None = None,
        extra: bytes = b"",
    ) -> None:
        """Send an answer; ``slot``, which holds ``tail``, is released once the answer is written."""
        ...

    def refuse(self, refusal: RefusedError) -> None:
        """Send an error."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """The handling of a request."""

    #: Called with the client, the head and the body; answers now or later, or raises `RefusedError`.
    handle: Callable[[HttpClient, HttpHead, RequestBody], None]
    max_body: int = MAX_DISCARDED_BYTES  #: Most bytes of the body.
    reads_body: bool = False  #: True if the body is needed; other bodies are discarded.
    #: Called with the JSON and the client before large tensors are received; raises the refusal where `submit` would.
    refuse_early: Callable[[Buffer, str], None] | None = None


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
    """Return the parsed head, blank line included. Raises `RefusedError`: 400, when the text is not HTTP."""
    head = HttpHead()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(text)
    except httptools.HttpParserUpgrade:
        pass  # the offer to speak another protocol is not taken up
    except httptools.HttpParserError as error:
        raise _explain_parser_error(error) from None
    if not head.target:
        raise bad_request("not HTTP: a request begins with a request line")
    head.method, headers = parser.get_method(), head.headers
    connection = headers.get(b"connection", b"").lower()
    if parser.get_http_version() == "1.1":
        head.keep_alive = b"close" not in connection
    else:
        head.keep_alive = b"keep-alive" in connection
        headers.pop(b"expect", None)  # RFC 9110, 10.1.1: such clients do not wait for 100 Continue
    # The parser has refused heads with both a length and chunks (RFC 9112, 6.3).
    head.length = _parse_number(headers.get(b"content-length", b"0")) or 0
    transfer = headers.get(b"transfer-encoding")
    head.chunked = transfer is not None
    if transfer is not None and transfer.lower() != b"chunked":
        raise bad_request("a body must be chunked or have a Content-Length")
    coding = headers.get(b"content-encoding", b"identity").lower()
    head.coding = None if coding == b"identity" else coding
    head.traceparent = headers.get(b"traceparent", b"").decode("latin-1")
    return head


def is_own_host(host: bytes, names: Collection[str]) -> bool:
    """Return whether a Host header is in ``names``, or is an address or a dotless name, impossible for web pages."""
    text = host.decode("latin-1").lower()
    name = text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0]
    if name in names or "." not in name.rstrip("."):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _parse_number(text: bytes) -> int | None:
    """Return a header's number; None for other text, and for numbers with thousands of digits."""
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


def respond_json(client: HttpClient, status: int, document: object, extra: bytes = b"") -> None:
    """Send a JSON document."""
    client.respond(status, CONTENT_JSON, orjson.dumps(document), extra=extra)


def allow_only(expected: str, method: str, route: Route) -> Route:
    """Return ``route`` if the method is allowed. Raises `RefusedError`: 405."""
    if method != expected:
        message = f"the method must be {expected} but got {method[:20]}"
        # RFC 9110, 15.5.6: an answer 405 lists the methods in Allow.
        methods = "GET, HEAD" if expected == "GET" else expected
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, message, allowed=methods)
    return route
