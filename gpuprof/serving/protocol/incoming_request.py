"""A request whose body is being received: where its bytes go, and when it is complete."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from http import HTTPStatus

import httptools

from gpuprof.serving.protocol.http_message import (
    COMPRESSIONS,
    MAX_KNOWN_BYTES,
    MOST_KNOWN,
    ChunkedBody,
    HttpHead,
    explain_parser_error,
    find_coding,
    make_chunk_parser,
    too_large_refusal,
)
from gpuprof.serving.protocol.http_route import ReceivedBody, Route
from gpuprof.serving.router.infer_request import RequestBody
from gpuprof.serving.transport.arena import ALIGNMENT, Arena, Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import RefusedError, bad_request, out_of_memory

#: Up to this size, receiving the body of a refused request costs both sides less than a new connection.
MAX_REFUSED_BYTES = 1 << 24
#: The memory of a body grows by this factor as it arrives; from `_LARGE_BYTES` on by 2.
_FIRST_GROWTH = 4
_FIRST_BYTES = 1 << 15
_LARGE_BYTES = 1 << 20
_JSON_LENGTH = b"inference-header-content-length"
#: Heads with one of these are not cached: a request with one takes more steps than its body.
_UNCACHED = frozenset((b"expect", b"content-encoding"))


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A cached head of an inference with a small body, with its route."""

    head: HttpHead
    route: Route
    length: int
    json_bytes: int


@dataclass(slots=True)
class IncomingRequest:
    """A request whose body is being received."""

    head: HttpHead
    arrived: float  #: Monotonic seconds.
    route: Route  #: Known once `set_route` was called.
    #: ``received``, ``length``: Bytes of the body.
    length: int = 0
    refusal: RefusedError | None = None  #: The answer of a refused request, whose body is discarded.
    #: Arena memory for the body as far as it is allocated; None: it goes into ``_data``, or is discarded.
    view: memoryview | None = None
    received: int = 0
    _is_undecided: bool = False
    _json_bytes: int = 0
    _slot: Slot | None = None
    _start: int = 0
    _chunks: tuple[httptools.HttpRequestParser, ChunkedBody] | None = None
    _data: bytearray = field(default_factory=bytearray)
    _charged: int = 0
    peer: str = ""  #: Address of its client.
    waited_ms: float = 0.0  #: For which the router did not read it, though it was there.

    @classmethod
    def begin(cls, head: HttpHead, arrived: float, peer: str = "", waited_ms: float = 0.0) -> IncomingRequest:
        """Return a request whose head has been received."""
        return cls(head, arrived, _DISCARD, head.length or 0, peer=peer, waited_ms=waited_ms)

    @property
    def is_complete(self) -> bool:
        """Whether the body is complete; `parse` tells that of a chunked one."""
        return self._chunks is None and self.received == self.length

    def set_route(self, route: Route) -> None:
        """Set the route, and check the body that the head announces.

        Raises
        ------
        RefusedError
            When the body is too large or compressed.
        """
        self.route = route
        coding = find_coding(self.head)
        if coding is not None:
            if coding not in COMPRESSIONS or not route.reads_body:
                text = "only the bodies of inference requests may be compressed, by gzip or deflate"
                raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
            # What it asks is known when it has been inflated.
            self.route = replace(route, refuse_early=None, lifo_after_s=math.inf)
        if self.head.chunked:
            body = ChunkedBody(route.max_body, route.reads_body)
            self._chunks = (make_chunk_parser(body), body)
            return
        if self.length > route.max_body:
            raise too_large_refusal(route.max_body)
        self._json_bytes = self._find_json_length()
        self._is_undecided = route.reads_body and self.length > INLINE_BYTES

    def remember_head(self, text: bytes, known: dict[bytes, KnownHead]) -> None:
        """Cache an inference's head that `set_route` has accepted, if its body is small.

        An equal head has the same framing, address and token, so that the result of all checks is the same.
        """
        is_small = not self.head.chunked and self.length <= INLINE_BYTES and len(text) <= MAX_KNOWN_BYTES
        headers = self.head.headers
        if self.route.reads_body and is_small and not headers.keys() & _UNCACHED:
            if len(known) >= MOST_KNOWN:
                known.clear()
            known[text] = KnownHead(self.head, self.route, self.length, self._json_bytes)

    def parse(self, buffer: bytearray, position: int, end: int, arena: Arena) -> tuple[int, bool]:
        """Take the bytes of the body out of ``buffer``; return where they end, and whether the body is complete.

        Raises
        ------
        RefusedError
            When it is malformed, or larger than the route or the memory allows.
        """
        if self._chunks is not None:
            return end, self._take_chunks(self._chunks, bytes(memoryview(buffer)[position:end]), arena)
        count = min(end - position, self.length - self.received)
        piece = memoryview(buffer)[position : position + count]
        if self._is_undecided:
            self._admit_body(piece, arena)
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
        """Whether the body is discarded: the request is refused, or its route reads none."""
        return self.refusal is not None or not self.route.reads_body

    @property
    def lifo_after_s(self) -> float:
        """Seconds of waiting after which newer bodies go first; infinite until the JSON has been received.

        Without it the request cannot be refused either, and would wait for as long as newer ones come.
        """
        return math.inf if self._json_bytes > self.received else self.route.lifo_after_s

    @property
    def is_full(self) -> bool:
        """Whether `grow` must be called before more is received in ``view``."""
        return self.view is not None and self.received == len(self.view) < self.length

    def receive_buffer(self, discard_buffer: bytearray) -> memoryview | None:
        """Return where the next bytes of the body are received: into its memory, or to be discarded.

        None where they must be parsed first.
        """
        if self.view is not None:
            return self.view[self.received :]
        if self.is_discarded and self._chunks is None:
            return memoryview(discard_buffer)[: self.length - self.received]
        return None

    def grow(self, arena: Arena) -> None:
        """Allocate more memory for the body, as it arrives, not as its length was announced.

        Raises
        ------
        RefusedError
            When there is none, and the rest is too long to be discarded.
        """
        assert self._slot is not None and self.view is not None
        allocated = len(self.view)
        size = min(self.length, (_FIRST_GROWTH if allocated < _LARGE_BYTES else 2) * allocated)
        slot = arena.grow(self._slot, size + ALIGNMENT)
        if slot is None:
            self.release(arena)
            self._refuse(out_of_memory())
            return
        self._start += slot.offset - self._slot.offset
        self._slot, self.view = slot, arena.view(self._start, size)

    def take_body(self) -> ReceivedBody:
        """Return the complete body; its memory is now the caller's to give back."""
        if self._slot is None:
            return ReceivedBody(RequestBody(bytes(self._data), self._json_bytes), None, self.arrived)
        assert self.view is not None
        received = ReceivedBody(RequestBody(self.view, self._json_bytes, self._start), self._slot, self.arrived)
        self._slot = self.view = None
        return received

    def release(self, arena: Arena) -> None:
        """Give back the memory of a body that will not be completed."""
        if self._slot is not None:
            arena.give_back(self._slot)
        self._slot = self.view = None
        arena.discharge(self._charged)
        self._charged = 0

    def _refuse(self, refusal: RefusedError) -> None:
        """Discard the rest, or refuse at once where that would take long."""
        if self.length > MAX_REFUSED_BYTES:
            raise refusal
        self.refusal = refusal.with_traceback(None)  # which refers to this frame: a reference cycle for each request

    def _admit_body(self, beginning: memoryview, arena: Arena) -> None:
        """Allocate memory for a large body that begins so, unless its request is to be refused anyway."""
        self._is_undecided = False
        try:
            if self.route.refuse_early is not None and self._json_bytes <= len(beginning):
                self.route.refuse_early(beginning[: self._json_bytes], self.peer, self.waited_ms)
            self._reserve(min(self.length, _FIRST_GROWTH * max(len(beginning), _FIRST_BYTES)), arena)
        except RefusedError as refusal:
            self._refuse(refusal)

    def admit_after_wait(self, waited_ms: float, arena: Arena) -> bool:
        """Refuse the request if it is late after this wait too; return whether the rest of its body is still needed.

        Raises
        ------
        RefusedError
            When it is refused, and the rest is too long to be discarded.
        """
        if self.view is None or self.route.refuse_early is None or self._json_bytes > self.received:
            return True
        try:
            self.route.refuse_early(self.view[: self._json_bytes], self.peer, self.waited_ms + waited_ms)
        except RefusedError as refusal:
            self.release(arena)
            self._refuse(refusal)
        return self.refusal is None

    def _reserve(self, size: int, arena: Arena) -> None:
        """Allocate memory for the first ``size`` bytes of a body, with its first tensor aligned."""
        slot = arena.take(size + ALIGNMENT)
        if slot is None:
            raise out_of_memory()
        self._slot = slot
        self._start = slot.offset + -self._json_bytes % ALIGNMENT
        self.view = arena.view(self._start, size)

    def _find_json_length(self) -> int:
        """Return how much of the body is JSON; of a compressed one the header speaks of what it was compressed from."""
        return self.length if find_coding(self.head) is not None else find_json_length(self.head, self.length)

    def _take_chunks(self, chunks: tuple[httptools.HttpRequestParser, ChunkedBody], data: bytes, arena: Arena) -> bool:
        parser, body = chunks
        before = len(body.data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise explain_parser_error(error) from None
        body.check_framing(len(data))
        if not arena.charge(more := len(body.data) - before):
            raise out_of_memory()
        self._charged += more
        if not body.is_complete:
            return False
        self._keep_chunks(body.data, arena)
        return True

    def _keep_chunks(self, data: bytearray, arena: Arena) -> None:
        """Move a complete chunked body to where one of a known length would be."""
        self.length = len(data)
        try:
            self._json_bytes = self._find_json_length()
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


def find_json_length(head: HttpHead, length: int) -> int:
    """Return how much of a body of ``length`` bytes is JSON. Raises `RefusedError`: 400, where that makes no sense."""
    text = head.headers.get(_JSON_LENGTH)
    if text is None:
        return length
    if not text.isdigit() or len(text) > 18 or int(text) > length:
        raise bad_request("Inference-Header-Content-Length must be a number and at most Content-Length")
    return int(text)


def _discard(client: object, head: HttpHead, received: ReceivedBody) -> None:
    raise AssertionError("a request without a route is refused before it is handled")


_DISCARD = Route(_discard)
