"""Which function answers which request of HTTP, and what it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from gpuprof.serving.protocol.http_message import HttpHead
from gpuprof.serving.router.infer_request import RequestBody
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.wire import Buffer

#: A body that no route reads is received up to this size, so that the connection can be kept.
MAX_DISCARDED_BYTES = 1 << 20


class HttpClient(Protocol):
    """The client of a request, which is to be answered once, by any of these methods."""

    on_disconnect: Callable[[], None] | None  #: Called when it disconnects before that.
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
    """A body, the arena slot in which it lies, and when its request arrived (monotonic seconds)."""

    body: RequestBody
    slot: Slot | None
    arrived: float


@dataclass(frozen=True, slots=True)
class Route:
    """How a request is answered."""

    #: Called with the client, the head and the body; answers now or later.
    handle: Callable[[HttpClient, HttpHead, ReceivedBody], None]
    max_body: int = MAX_DISCARDED_BYTES  #: Most bytes of the body.
    #: Whether the body is read: a large one is then received in the arena. Other bodies are discarded.
    reads_body: bool = False
    #: Called before large tensors are received, with the JSON that they follow, the client, and the ms for which the
    #: router has kept it waiting: raises the refusal of a request that would be refused anyway.
    refuse_early: Callable[[Buffer, str, float], None] | None = None
    #: Lane of the request under overload: its model; None: the lane of its client.
    lane: Hashable = None
    #: Once a large body has waited for its turn for so many seconds, the newest go first (adaptive LIFO).
    lifo_after_s: float = math.inf


def allow_only(allowed: str, method: str, route: Route) -> Route:
    """Return ``route`` if the request has the method of its address.

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
