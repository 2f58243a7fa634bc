"""Routes of HTTP requests and the interface of their clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import orjson

from gpuprof.serving.protocol.http_message import CONTENT_JSON, HttpHead
from gpuprof.serving.router.infer_request import RequestBody
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.wire import Buffer

#: Largest unneeded body that is received and dropped, which costs less than a new connection.
MAX_DISCARDED_BYTES = 1 << 24


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

    #: Called with the client, the head and the body; answers now or later.
    handle: Callable[[HttpClient, HttpHead, RequestBody], None]
    max_body: int = MAX_DISCARDED_BYTES  #: Most bytes of the body.
    reads_body: bool = False  #: True if the body is needed; other bodies are discarded.
    #: Called with the JSON and the client before large tensors are received; raises the refusal where `submit` would.
    refuse_early: Callable[[Buffer, str], None] | None = None


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
