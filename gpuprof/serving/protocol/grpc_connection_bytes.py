"""Which connections of gRPC send much that belongs to no message.

HTTP/2 limits how much of a message may be sent that nobody waits for; control frames nothing limits. grpcio answers
each, and reads ahead as much as there is (seen with 1.85, whose reads grow with those before): somebody who sends
settings as fast as it goes keeps a core busy and gets tens of megabytes of memory for each connection. The system tells
how many bytes a connection has had (TCP_INFO), the calls how many of them were messages. Who goes beyond that by more
than calls can explain is shut out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import unquote

#: Address and port of a client.
Peer = tuple[str, int]
#: Beyond messages: once, and for each second. Of calls that are still to be taken up, 64 KiB of each may have come.
_ONCE_BYTES, _BYTES_PER_S = 16 << 20, 1 << 20
#: Of that only so much, and so many times its messages, for who has sent little: a head that never ends takes the core
#: more than twice its length, needs no token, and anybody may have hundreds of connections.
_FIRST_BYTES, _TIMES_MESSAGES = 1 << 20, 16
#: For the head of a call and the ends of its message, and of a message what frames and TLS add to it.
_CALL_BYTES, _OVERHEAD = 4096, 1 / 16
#: What had come so many looks ago is judged by the messages that are known now: they are told a little later.
_LAG = 2


class ConnectionBytes:
    """Compares what connections have sent with the messages that came of it.

    Parameters
    ----------
    max_message_bytes : int
        So much may have come of a message that is not whole.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._explained: dict[str, int] = {}
        self._receiving: dict[str, int] = {}
        self._admitted: set[str] = set()
        self._tell_of_admitted: Callable[[], object] = lambda: None
        self._forgiven: dict[Peer, float] = {}
        self._futile: set[Peer] = set()
        self._seen: deque[Mapping[Peer, int]] = deque(maxlen=_LAG)

    def begin_message(self, uri: str, most: int | None = None) -> None:
        """Note that a call of this client (``ipv4:127.0.0.1:50412``) waits for a message, of at most so many bytes.

        Without ``most`` it is one for inference, which was admitted.
        """
        if most is None and uri not in self._admitted:
            self._admitted.add(uri)
            self._tell_of_admitted()
        self._receiving[uri] = self._receiving.get(uri, 0) + (most or self._max_message_bytes)

    def end_message(self, uri: str, size: int | None, most: int | None = None) -> None:
        """Note that it waits no more: a message of so many bytes has come, None: an unknown part of one."""
        most = most or self._max_message_bytes
        left = self._receiving[uri] - most
        if left:
            self._receiving[uri] = left
        else:
            del self._receiving[uri]
        more = most if size is None else _CALL_BYTES + int((1.0 + _OVERHEAD) * size)
        self._explained[uri] = self._explained.get(uri, 0) + more

    def tell_of_admitted(self, tell: Callable[[], object]) -> None:
        """Have ``tell`` called when a call for inference is the first of its client."""
        self._tell_of_admitted = tell

    def list_admitted(self) -> set[Peer]:
        """Return who has made calls for inference; other threads may ask."""
        return {_peer_of_uri(uri) for uri in list(self._admitted)}

    def explain(self) -> dict[Peer, int]:
        """Return how many bytes of each client messages account for at most; other threads may ask."""
        return {_peer_of_uri(uri): count for uri, count in list(self._explained.items())}

    def judge(self, explained: Mapping[Peer, int], received: Mapping[Peer, int], elapsed_s: float) -> list[Peer]:
        """Return who has sent too much that is no message: once, though the connection may take a while to end.

        Parameters
        ----------
        explained : mapping of Peer to int
            What `explain` returned before ``received`` was looked at.
        received : mapping of Peer to int
            Bytes that each connection has had.
        elapsed_s : float
            Since this was last called.
        """
        earlier = self._seen[0] if len(self._seen) == _LAG else {}
        self._seen.append(received)
        awaited = {_peer_of_uri(uri): min(most, self._max_message_bytes) for uri, most in self._receiving.items()}
        futile = []
        for peer, had in earlier.items():
            if peer not in received:
                continue
            known, forgiven = explained.get(peer, 0), self._forgiven.get(peer, 0.0)
            beyond = had - known - forgiven
            allowed = min(_ONCE_BYTES, _FIRST_BYTES + _TIMES_MESSAGES * known) + awaited.get(peer, 0)
            if beyond > allowed and peer not in self._futile:
                futile.append(peer)
            # What is explained beyond all that has come explains nothing that comes later.
            credit = min(max(0.0, beyond), _BYTES_PER_S * elapsed_s)
            self._forgiven[peer] = min(forgiven + credit, received[peer] - known)
        self._futile = (self._futile | set(futile)) & set(received)
        self._forget(explained, received)
        return futile

    def _forget(self, explained: Mapping[Peer, int], received: Mapping[Peer, int]) -> None:
        """Forget connections that are no more, which had sent something before it was looked who there is."""
        gone = {peer for peer in explained if peer not in received}
        if gone:
            for uri in [uri for uri in self._explained if _peer_of_uri(uri) in gone and uri not in self._receiving]:
                del self._explained[uri]
                self._admitted.discard(uri)
        self._forgiven = {peer: count for peer, count in self._forgiven.items() if peer in received}


@lru_cache(4096)
def _peer_of_uri(uri: str) -> Peer:
    address, _, port = unquote(uri).partition(":")[2].rpartition(":")
    return address.strip("[]").partition("%")[0], int(port) if port.isdigit() else 0
