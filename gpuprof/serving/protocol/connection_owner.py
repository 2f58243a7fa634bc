"""What an HTTP connection asks of the server that it belongs to."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

from gpuprof.serving.protocol.body_receiver import BodyOwner

if TYPE_CHECKING:
    from gpuprof.serving.protocol.connection_set import ConnectionSet
    from gpuprof.serving.protocol.http_message import HttpHead
    from gpuprof.serving.protocol.http_route import Route
    from gpuprof.serving.protocol.incoming_request import KnownHead
    from gpuprof.serving.protocol.loop_turns import LoopTurns
    from gpuprof.serving.protocol.record_turns import RecordTurns
    from gpuprof.serving.transport.inference import RefusedError
    from gpuprof.serving.transport.wire import Buffer


class ConnectionOwner(BodyOwner, Protocol):
    """What connections share."""

    scratch: bytearray
    connections: ConnectionSet[Any]
    turns: LoopTurns
    records: RecordTurns
    known_heads: dict[bytes, KnownHead]

    @property
    def draining(self) -> bool:
        """Whether connections are to be closed after their answer."""
        ...

    def count_refusal(self, refusal: RefusedError) -> None:
        """Count an answer that is a refusal."""
        ...

    def find_lane(self, beginning: Buffer) -> Hashable:
        """Return the lane of a request that begins with these bytes; None: the lane of its client."""
        ...

    def find_route(self, head: HttpHead) -> Route:
        """Return the route of a request. Raises `RefusedError`: 404, 405, …"""
        ...
