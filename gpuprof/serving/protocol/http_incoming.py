"""A request whose body is being received: where its bytes go, and when it is whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

import httptools

from gpuprof.serving.protocol.http_message import (
    MAX_KNOWN_BYTES,
    MOST_KNOWN,
    ChunkedBody,
    HttpHead,
    explain_parser_error,
    make_chunk_parser,
    too_large_refusal,
)
from gpuprof.serving.router.infer_request import RequestBody
from gpuprof.serving.transport.arena import ALIGNMENT, Arena, Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import RefusedError, bad_request, out_of_memory
from gpuprof.serving.transport.wire import Buffer

#: A body that nobody reads is received up to here, so that the connection can be kept.
MAX_DISCARDED_BYTES = 1 << 20
#: Up to here receiving a large body for nothing costs both sides less than a new connection.
MAX_REFUSED_BYTES = 1 << 24
#: A body has memory for so many times what has come of it; for twice that much from `_LARGE_BYTES` on.
_FIRST_GROWTH = 4
_FIRST_BYTES = 1 << 15
_LARGE_BYTES = 1 << 20
_JSON_LENGTH = b"inference-header-content-length"


class HttpClient(Protocol):
    """Who asked, and is to be answered once, by any of these calls."""

    on_disconnect: Callable[[], None] | None  #: Called when it goes before that.
    peer: str  #: Its address.

    def respond(
        self,
        status: int,
        content_type: bytes,
        body: Buffer,
        tail: list[Buffer] | None = None,
        slot: Slot | None = None,
        extra: bytes = b"",
    ) -> None:
        """Answer; ``slot`` is given back when ``tail``, which lies in it, has been written."""
        ...

    def respond_json(self, status: int, document: object, extra: bytes = b"") -> None:
        """Answer with a JSON document."""
        ...

    def refuse(self, refusal: RefusedError) -> None:
        """Answer with an error."""
        ...


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class ReceivedBody:
    """A body, the memory that it holds, and when it began to arrive (monotonic seconds)."""

    body: RequestBody
    slot: Slot | None
    arrived: float


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a request."""

    #: Given who asked, the head and the body; answers now or later.
    handle: Callable[[HttpClient, HttpHead, ReceivedBody], None]
    max_body: int = MAX_DISCARDED_BYTES  #: Bytes that the body may have.
    #: Whether the body is read: a large one is then received in the arena. Of others nothing is kept as it comes.
    reads_body: bool = False
    #: Given the JSON that large tensors are about to follow, who sends it, and for how many ms the router has kept it
    #: waiting, raises the refusal of a request that need not be received because it will be refused anyhow.
    refuse_early: Callable[[Buffer, str, float], None] | None = None
    #: With whom it shares its part of the router while that cannot keep up: its model's requests; None: its client's.
    lane: Hashable = None
    #: Where a large body has waited for its turn for so many seconds, those that came later go first.
    lifo_after_s: float = math.inf


def allow_only(allowed: str, method: str, route: Route) -> Route:
    """Return ``route`` where a request has the method that its address has.

    Raises
    ------
    RefusedError
        405.
    """
    if method != allowed:
        message = f"the method must be {allowed} but got {method[:20]}"
        # RFC 9110, 15.5.6: an answer 405 must say in Allow what is allowed.
        every = "GET, HEAD" if allowed == "GET" else allowed
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, message, allowed=every)
    return route


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A head that came before, of an inference whose body is small: what it says, and what answers it."""

    head: HttpHead
    route: Route
    length: int
    json_bytes: int


@dataclass(slots=True)
class Incoming:
    """A request whose body is being received."""

    head: HttpHead
    arrived: float  #: Monotonic seconds.
    route: Route  #: Known once it was prepared.
    #: ``received``, ``length``: Bytes of the body.
    length: int = 0
    refusal: RefusedError | None = None  #: The body is received for nothing: this is the answer.
    #: Where in the arena the body goes, as far as there is memory for it; None: into ``data``, or nowhere.
    view: memoryview | None = None
    received: int = 0
    _undecided: bool = False
    _json_bytes: int = 0
    _slot: Slot | None = None
    _start: int = 0
    _chunks: tuple[httptools.HttpRequestParser, ChunkedBody] | None = None
    _data: bytearray = field(default_factory=bytearray)
    _charged: int = 0
    peer: str = ""  #: Address of who sends it.

    @classmethod
    def begin(cls, head: HttpHead, arrived: float, peer: str = "") -> Incoming:
        """Return a request of which the head is there."""
        return cls(head, arrived, _DISCARD, head.length or 0, peer=peer)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing; of a chunked body `take` says so."""
        return self._chunks is None and self.received == self.length

    def prepare(self, route: Route) -> None:
        """Prepare for the body that ``route`` takes.

        Raises
        ------
        RefusedError
            When it is too large or compressed.
        """
        self.route = route
        if self.head.headers.get(b"content-encoding", b"identity") != b"identity":
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not supported")
        if self.head.chunked:
            body = ChunkedBody(route.max_body, route.reads_body)
            self._chunks = (make_chunk_parser(body), body)
            return
        if self.length > route.max_body:
            raise too_large_refusal(route.max_body)
        self._json_bytes = _json_length(self.head, self.length)
        self._undecided = route.reads_body and self.length > INLINE_BYTES

    def remember_head(self, text: bytes, known: dict[bytes, KnownHead]) -> None:
        """Enter an inference's head that `prepare` has passed among the known ones, if its body is small.

        Whatever the head decides is decided for the next that is the same: its framing, its address, its token.
        """
        is_small = not self.head.chunked and self.length <= INLINE_BYTES and len(text) <= MAX_KNOWN_BYTES
        if self.route.reads_body and is_small and b"expect" not in self.head.headers:
            if len(known) >= MOST_KNOWN:
                known.clear()
            known[text] = KnownHead(self.head, self.route, self.length, self._json_bytes)

    def take(self, buffer: bytearray, position: int, end: int, arena: Arena) -> tuple[int, bool]:
        """Take what belongs to the body out of ``buffer``; return how far that is, and whether the body is whole.

        Raises
        ------
        RefusedError
            When it is no body, or larger than the route or the memory takes.
        """
        if self._chunks is not None:
            return end, self._take_chunks(self._chunks, bytes(memoryview(buffer)[position:end]), arena)
        count = min(end - position, self.length - self.received)
        piece = memoryview(buffer)[position : position + count]
        if self._undecided:
            self._decide(piece, arena)
        while self.view is not None and self.received + count > len(self.view):
            self.grow(arena)
        if self.view is not None:
            self.view[self.received : self.received + count] = piece
        elif not self.is_discarded:
            self._data += piece
        self.received += count
        return position + count, self.received == self.length

    @property
    def is_discarded(self) -> bool:
        """Whether the body is received for nothing: it is refused, or nobody reads it."""
        return self.refusal is not None or not self.route.reads_body

    @property
    def lifo_after_s(self) -> float:
        """Seconds of waiting after which later ones go first; never before one that nothing is known of.

        It could not be refused either: it would wait for as long as others come.
        """
        return math.inf if self._json_bytes > self.received else self.route.lifo_after_s

    @property
    def is_full(self) -> bool:
        """Whether `grow` must be called before more can be received in ``view``."""
        return self.view is not None and self.received == len(self.view) < self.length

    def space(self, waste: bytearray) -> memoryview | None:
        """Return where the next bytes of the body go as they come: into its memory, or, of one discarded, to waste.

        None where they must be looked at first.
        """
        if self.view is not None:
            return self.view[self.received :]
        if self.is_discarded and self._chunks is None:
            return memoryview(waste)[: self.length - self.received]
        return None

    def grow(self, arena: Arena) -> None:
        """Take memory for more of a body: as it comes, not as it was announced.

        Raises
        ------
        RefusedError
            When there is none, and the rest is too long to be received for nothing.
        """
        assert self._slot is not None and self.view is not None
        had = len(self.view)
        size = min(self.length, (_FIRST_GROWTH if had < _LARGE_BYTES else 2) * had)
        slot = arena.grow(self._slot, size + ALIGNMENT)
        if slot is None:
            self.release(arena)
            self._refuse(out_of_memory())
            return
        self._start += slot.offset - self._slot.offset
        self._slot, self.view = slot, arena.view(self._start, size)

    def body(self) -> ReceivedBody:
        """Return what was received; from now on the memory is the receiver's to give back."""
        if self._slot is None:
            return ReceivedBody(RequestBody(bytes(self._data), self._json_bytes), None, self.arrived)
        assert self.view is not None
        received = ReceivedBody(RequestBody(self.view, self._json_bytes, self._start), self._slot, self.arrived)
        self._slot = self.view = None
        return received

    def release(self, arena: Arena) -> None:
        """Give back the memory of a body that nobody will receive."""
        if self._slot is not None:
            arena.give_back(self._slot)
        self._slot = self.view = None
        arena.discharge(self._charged)
        self._charged = 0

    def _refuse(self, refusal: RefusedError) -> None:
        """Receive the rest for nothing, or refuse at once where that would take long."""
        if self.length > MAX_REFUSED_BYTES:
            raise refusal
        self.refusal = refusal.with_traceback(None)  # which leads back here: a cycle for each request

    def _decide(self, beginning: memoryview, arena: Arena) -> None:
        """Find a place for a large body of which this is the beginning, or none, if it is to be refused anyhow."""
        self._undecided = False
        try:
            if self.route.refuse_early is not None and self._json_bytes <= len(beginning):
                self.route.refuse_early(beginning[: self._json_bytes], self.peer, 0.0)
            self._reserve(min(self.length, _FIRST_GROWTH * max(len(beginning), _FIRST_BYTES)), arena)
        except RefusedError as refusal:
            self._refuse(refusal)

    def is_still_wanted(self, waited_ms: float, arena: Arena) -> bool:
        """Return whether the rest is to be received for its answer, after so long a wait; else it is refused.

        Raises
        ------
        RefusedError
            When it is refused, and the rest is too long to be received for nothing.
        """
        if self.view is None or self.route.refuse_early is None or self._json_bytes > self.received:
            return True
        try:
            self.route.refuse_early(self.view[: self._json_bytes], self.peer, waited_ms)
        except RefusedError as refusal:
            self.release(arena)
            self._refuse(refusal)
        return self.refusal is None

    def _reserve(self, size: int, arena: Arena) -> None:
        """Take memory for the first ``size`` bytes of a body, placed so that the first tensor in it is aligned."""
        slot = arena.take(size + ALIGNMENT)
        if slot is None:
            raise out_of_memory()
        self._slot = slot
        self._start = slot.offset + -self._json_bytes % ALIGNMENT
        self.view = arena.view(self._start, size)

    def _take_chunks(self, chunks: tuple[httptools.HttpRequestParser, ChunkedBody], data: bytes, arena: Arena) -> bool:
        parser, body = chunks
        had = len(body.data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise explain_parser_error(error) from None
        body.check_framing(len(data))
        if not arena.charge(more := len(body.data) - had):
            raise out_of_memory()
        self._charged += more
        if not body.is_whole:
            return False
        self._keep_chunks(body.data, arena)
        return True

    def _keep_chunks(self, data: bytearray, arena: Arena) -> None:
        """Take a body that is whole, and put it where one of a known length would be."""
        self.length = len(data)
        try:
            self._json_bytes = _json_length(self.head, self.length)
            if self.route.reads_body and self.length > INLINE_BYTES:
                self.release(arena)
                self._reserve(self.length, arena)
        except RefusedError as refusal:
            self.refusal = refusal.with_traceback(None)
        if self.view is not None:
            self.view[:] = data
        else:
            self._data = data
        arena.discharge(self._charged)
        self._charged = 0


def _json_length(head: HttpHead, length: int) -> int:
    text = head.headers.get(_JSON_LENGTH)
    if text is None:
        return length
    if not text.isdigit() or len(text) > 18 or int(text) > length:
        raise bad_request("Inference-Header-Content-Length must be a number and at most Content-Length")
    return int(text)


def _discard(client: HttpClient, head: HttpHead, received: ReceivedBody) -> None:
    raise AssertionError("a request without a route is refused before it is handled")


_DISCARD = Route(_discard)
