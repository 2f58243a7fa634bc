"""A connection to the port of gRPC whose client has not said yet what it must say first."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable

from gpuprof.serving.protocol.http2_frames import ACKNOWLEDGEMENT, FrameError, find_preface_end
from gpuprof.serving.protocol.poller import Poller
from gpuprof.serving.transport.tls_hello import can_begin_tls

#: The name of HTTP/2 in TLS (ALPN), which clients of gRPC must offer.
HTTP2 = "h2"
#: A record of TLS is never longer.
RECORD_BYTES = 1 << 14
#: What is raised where there is nothing to read yet, or no room to write.
AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
#: A client that has not finished its TLS handshake for so long makes room where there are too many.
_HANDSHAKE_S = 1.0


class PendingConnection:
    """A client that has not yet said what it must say first: that costs no more than a socket.

    Parameters
    ----------
    poller : Poller
    client : socket
        Non-blocking.
    peer : str
        Whose connections are counted together.
    context : SSLContext or None
        For TLS, which begins when the client says something.
    on_hello : callable
        Told when TLS can begin, which waits for `begin_tls`.
    on_ready : callable
        Told when the client has sent the preface and its settings.
    on_closed : callable
        Told when it is given up.

    Attributes
    ----------
    touched : float
        When it was accepted; monotonic seconds.
    lacks_http2 : bool
        Whether the client has not offered HTTP/2 with TLS, as gRPC has it.
    begin, carried : bytes
        What grpcio is to be sent first, with the acknowledgement of its settings, and what the client has sent beyond.
    """

    def __init__(
        self,
        poller: Poller,
        client: socket.socket,
        peer: str,
        context: ssl.SSLContext | None,
        on_hello: Callable[[PendingConnection], None],
        on_ready: Callable[[PendingConnection], None],
        on_closed: Callable[[PendingConnection], None],
    ) -> None:
        self._poller, self.client, self.peer, self._context = poller, client, peer, context
        self._on_hello, self._on_ready, self._on_closed = on_hello, on_ready, on_closed
        self.begin = self.carried = b""
        self._said = bytearray()
        self.lacks_http2 = self._may_begin = False
        self.touched = time.monotonic()
        poller.watch(client, select.EPOLLIN, self._handle)

    def is_idle_at(self, now: float) -> bool:
        """Return whether the client has begun nothing, or has had time to finish it."""
        return not isinstance(self.client, ssl.SSLSocket) or now - self.touched > _HANDSHAKE_S

    def is_unfinished_at(self, now: float) -> bool:
        """Return False: nothing has been asked yet."""
        return False

    def begin_tls(self) -> None:
        """Do the first part of the handshake, which takes a millisecond."""
        self._may_begin = True
        self._handle(0)

    def abort(self) -> None:
        """Close the connection."""
        self._poller.unwatch(self.client)
        self.client.close()
        self._on_closed(self)

    def _handle(self, _: int) -> None:
        try:
            if self._context is not None and not self._shake_hands(self._context):
                return
            while more := self.client.recv(RECORD_BYTES):
                self._said += more
                if length := find_preface_end(self._said):
                    self.begin, self.carried = bytes(self._said[:length]) + ACKNOWLEDGEMENT, bytes(self._said[length:])
                    self._poller.unwatch(self.client)
                    self._on_ready(self)
                    return
            self.abort()
        except AGAIN:
            pass
        except (OSError, FrameError, ValueError):  # what is no TLS is an OSError, too, or a ValueError
            self.abort()

    def _shake_hands(self, context: ssl.SSLContext) -> bool:
        if not isinstance(self.client, ssl.SSLSocket):
            if not self._may_begin:
                if can_begin_tls(self.client):
                    self._poller.unwatch(self.client)
                    self._on_hello(self)
                return False
            self.client = context.wrap_socket(self.client, server_side=True, do_handshake_on_connect=False)
            self._poller.watch(self.client, select.EPOLLIN, self._handle)
        self.client.do_handshake()
        self._context = None
        self.lacks_http2 = self.client.selected_alpn_protocol() != HTTP2
        if self.lacks_http2:
            self.abort()
        return not self.lacks_http2
