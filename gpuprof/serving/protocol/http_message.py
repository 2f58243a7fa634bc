"""Heads of HTTP requests, read by httptools, and of answers. Source: RFC 9112."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus

import httptools

from gpuprof.serving.transport.inference import RefusedError, bad_request

CONTENT_JSON = b"application/json"
CONTENT_BINARY = b"application/octet-stream"
_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
#: Two of them may be read in two ways, by a proxy and here: where a request ends, and who sends it.
_GIVEN_ONCE = frozenset(
    b"authorization content-encoding content-length host inference-header-content-length transfer-encoding".split()
)
#: How bodies may be compressed, as Content-Encoding says it: zlib tells which of them it is.
COMPRESSIONS = frozenset((b"gzip", b"x-gzip", b"deflate"))
#: Header lines of a request; each costs more than the rest of a short one.
_MAX_LINES = 256
_MOST_DIGITS = 18
#: Heads that are remembered, and bytes of one.
MOST_KNOWN, MAX_KNOWN_BYTES = 256, 1024
#: What may stand around the chunks of a body beyond so many times the body: a chunk of a byte has five bytes around it.
_MAX_FRAMING_BYTES, _MAX_FRAMING_PART = 1 << 16, 16
#: A name, or an address, in brackets where it is one of IPv6; and a port (RFC 9110, 7.2; RFC 3986, 3.2.2).
_HOST = re.compile(rb"(\[[\w:.%~-]+\]|[\w.~%!$&'()*+,;=-]*)(:\d*)?")
_AUTHORIZATION = b"\r\nauthorization:"
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


@dataclass(slots=True)
class HttpHead:
    """Request line and headers."""

    method: bytes = b""
    target: bytes = b""
    #: Names in lower case; of a name given twice the last.
    headers: dict[bytes, bytes] = field(default_factory=dict)
    length: int | None = None  #: Content-Length; None when none was given.
    chunked: bool = False
    keep_alive: bool = True
    repeated: bytes | None = None  #: A header that was given twice, of those that may be given once.
    is_complete: bool = False  #: Whether the parser has found its end.
    lines: int = 0  #: Of headers.
    #: The parser's answer, which is right only while the headers have just been read.
    ask_keep_alive: Callable[[], bool] | None = field(default=None, repr=False, compare=False)

    def on_url(self, url: bytes) -> None:
        """Called by the parser, perhaps several times."""
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.lines += 1
        if self.lines > _MAX_LINES:
            text = f"a request may have {_MAX_LINES} headers"
            raise RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
        name = name.lower()
        if name in self.headers and name in _GIVEN_ONCE:
            self.repeated = name
        self.headers[name] = value.rstrip(b" \t")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.is_complete = True
        if self.ask_keep_alive is not None:
            self.keep_alive, self.ask_keep_alive = self.ask_keep_alive(), None


@dataclass(slots=True)
class ChunkedBody:
    """Collects a body whose length is not known in advance."""

    limit: int
    is_read: bool = True  #: Whether the body is needed; else its bytes are only counted.
    data: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    _size: int = 0
    _received: int = 0

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._size += len(data)
        if self._size > self.limit:
            raise too_large_refusal(self.limit)
        if self.is_read:
            self.data += data

    def check_framing(self, received: int) -> None:
        """Count bytes that came, and refuse a body around which too much comes: extensions and trailers have no end.

        Raises
        ------
        RefusedError
            400.
        """
        self._received += received
        if self._received - self._size > _MAX_FRAMING_BYTES + _MAX_FRAMING_PART * self._size:
            raise bad_request("the chunks of the body have too much around them")

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self.is_complete = True


def find_coding(head: HttpHead) -> bytes | None:
    """Return how the body of a request is compressed, in lower case; None: it is not."""
    coding = head.headers.get(b"content-encoding", b"identity").lower()
    return None if coding == b"identity" else coding


def read_head(text: bytes) -> HttpHead:
    """Read a head, blank line included; nobody changes it: requests of one client have the same again and again.

    Raises
    ------
    RefusedError
        400, when it is no HTTP; 431, when it has too many headers.
    """
    return _find_head(text) if len(text) <= MAX_KNOWN_BYTES else _parse_head(text)


@lru_cache(MOST_KNOWN)
def _find_head(text: bytes) -> HttpHead:
    return _parse_head(text)


def _parse_head(text: bytes) -> HttpHead:
    head = HttpHead()
    parser = httptools.HttpRequestParser(head)
    head.ask_keep_alive = parser.should_keep_alive
    try:
        parser.feed_data(text)
    except httptools.HttpParserUpgrade:
        pass  # the offer to speak another protocol is not taken up
    except httptools.HttpParserError as error:
        raise explain_parser_error(error) from None
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
    return head


def _read_host(head: HttpHead, version: str) -> None:
    """Find out who is meant: the one header Host, or the target where it has the absolute form (section 3.2.2)."""
    # RFC 9112, 3.2: 400 for a request of HTTP/1.1 without Host.
    if version == "1.0":  # RFC 9110, 10.1.1: of 100-continue such a client knows nothing
        head.headers.pop(b"expect", None)
    elif b"host" not in head.headers:
        raise bad_request("a request must have one header Host")
    for scheme in (b"http://", b"https://"):
        if head.target[: len(scheme)].lower() == scheme:
            authority, slash, rest = head.target[len(scheme) :].partition(b"/")
            head.headers[b"host"], head.target = authority, slash + rest if slash else b"/"
    if not _HOST.fullmatch(head.headers.get(b"host", b"")):  # RFC 9112, 3.2
        raise bad_request("the header Host, or the address in its place, must be a name or an address, and a port")


def is_own_host(host: bytes, names: Collection[str]) -> bool:
    """Return whether a header Host is one of ``names``, an address, or a name without a dot, which no page can have."""
    text = host.decode("latin-1").lower()
    name = text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0]
    if name in names or "." not in name.rstrip("."):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def find_authorization(beginning: bytes) -> bytes:
    """Return what a header Authorization says in a head that begins so and may go on; empty where there is none."""
    begin = beginning.lower().find(_AUTHORIZATION)
    return beginning[begin + len(_AUTHORIZATION) :].partition(b"\r\n")[0].strip() if begin >= 0 else b""


def _read_framing(head: HttpHead) -> None:
    length = head.headers.get(b"content-length")
    if length is not None:
        if not length.isdigit() or len(length) > _MOST_DIGITS:
            raise bad_request(f"Content-Length must be a number of at most {_MOST_DIGITS} digits")
        head.length = int(length)
    coding = head.headers.get(b"transfer-encoding")
    if coding is not None:
        # Both at once are how requests are smuggled past proxies that believe the other one (RFC 9112, 6.3 and 11.2).
        if coding.lower() != b"chunked" or length is not None:
            raise bad_request("a body must be chunked or have a Content-Length")
        head.chunked = True


def make_chunk_parser(body: ChunkedBody) -> httptools.HttpRequestParser:
    """Return a parser that hands the chunks that follow a head to ``body``.

    It has read a head of ours: what else stood in that of the client, an offer to speak another protocol, say, is none
    of its business.
    """
    parser = httptools.HttpRequestParser(body)
    parser.feed_data(_CHUNKED_HEAD)
    return parser


def explain_parser_error(error: httptools.HttpParserError) -> RefusedError:
    """Return why a parser gave up: what it was told to refuse, or what is no HTTP."""
    cause = error.__context__
    return cause if isinstance(cause, RefusedError) else bad_request(f"not HTTP: {error}")


def too_large_refusal(limit: int) -> RefusedError:
    """Return the refusal of a body of more than ``limit`` bytes."""
    return RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {limit} bytes")


def write_head(status: int, content_type: bytes, length: int, keep_alive: bool, extra: bytes = b"") -> bytes:
    """Return the head of an answer; ``extra`` is further header lines, each with its line end."""
    closing = b"" if keep_alive else b"Connection: close\r\n"
    return b"%sContent-Type: %s\r\nContent-Length: %d\r\n%s%s\r\n" % (
        _STATUS_LINES[status],
        content_type,
        length,
        closing,
        extra,
    )


def refusal_headers(refusal: RefusedError) -> bytes:
    """Return the header lines that the answer of a refusal has beside those of every answer."""
    lines = b""
    if refusal.retry_after_s is not None:
        lines = b"Retry-After: %d\r\n" % max(1, round(refusal.retry_after_s))
    if refusal.allowed:
        lines += b"Allow: %s\r\n" % refusal.allowed.encode()
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        lines += b"WWW-Authenticate: Bearer\r\n"
    return lines
