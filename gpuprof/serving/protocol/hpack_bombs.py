"""Finds connections that send HPACK bombs: heads of calls of which each byte is a field.

grpcio (1.85) holds a head to a size once the client has acknowledged the server's settings, which an attacker never
does: it then keeps some 70 bytes for each byte that came, of up to half a million fields a head. It does not tell how
much of what came is heads, but memory does: where it grows far more than by what connections have sent, those are shut
out of which no call for inference was admitted and that have sent more than a head of ordinary size, and when that is
not enough, the one that has sent the most that was no message.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from gpuprof.serving.protocol.grpc_connection_bytes import Peer

#: A client that waits for its first call to be admitted sends some hundred bytes, up to six thousand with TLS, and of
#: its message what HTTP/2's first window allows, 64 KiB.
ORDINARY_BYTES, _MOST_BYTES = 1 << 13, 1 << 17
#: Memory beyond what is accounted for that is no reason to act: free memory is returned when it is less than that.
_GROWN_BYTES = 512 << 20
#: How much memory may rise within seconds, and how many times as much as came: then clients that were not admitted
#: are shut out, and when it is far more, others. What it rises by more slowly is no flood; some hundred TLS handshakes
#: at once take 100 MB.
_RISE_BYTES, _LARGE_RISE_BYTES, _RISE_TIMES, _SLOW_BYTES_PER_S = 192 << 20, 320 << 20, 8, 4 << 20
#: Requests and answers, of HTTP as well, take so many times their own size while they are parsed and written, and what
#: they took is free again long before the system has it back: it is forgotten so fast.
_WORKING_TIMES, _FORGOTTEN_BYTES_PER_S = 4, 32 << 20
#: Control frames are forgiven so fast.
_FORGIVEN_BYTES_PER_S = 1 << 14


class HpackBombDetector:
    """Adds up what connections have sent beyond the messages of their calls."""

    def __init__(self) -> None:
        self._received: Mapping[Peer, int] = {}
        self._explained: Mapping[Peer, int] = {}
        self._beyond: dict[Peer, float] = {}
        self._calm_bytes = self._slow_bytes = self._elapsed_s = 0.0
        self._charged_bytes = 0.0
        self._suspects: set[Peer] = set()
        #: Whether memory has risen by more than can be worked off in a moment.
        self.is_flooded = False

    def note(self, received: Mapping[Peer, int], explained: Mapping[Peer, int], elapsed_s: float) -> None:
        """Take up what has come since this was last called.

        What is explained beyond all that has come explains nothing that comes later.

        Parameters
        ----------
        received, explained : mapping of Peer to int
            Bytes that each connection has had, and those that were messages, since it began.
        elapsed_s : float
        """
        forgiven = _FORGIVEN_BYTES_PER_S * elapsed_s
        beyond = {}
        for peer, count in received.items():
            more = count - self._received.get(peer, 0) - explained.get(peer, 0) + self._explained.get(peer, 0)
            beyond[peer] = max(0.0, self._beyond.get(peer, 0.0) + more - forgiven)
        self._received, self._explained, self._beyond = received, explained, beyond
        self._elapsed_s = elapsed_s

    def find_excess(self, admitted: Set[Peer], grown_bytes: int, charged_bytes: int = 0) -> list[Peer]:
        """Return who is to be shut out: who was suspected when this was last called, and still is.

        The head of a call that means well has been read by then.

        Parameters
        ----------
        admitted : set of Peer
            Who has made a call for inference that was admitted.
        grown_bytes, charged_bytes : int
            Memory of the process beyond that at rest, and how much of it requests and answers have.
        """
        unadmitted = self._beyond.keys() - admitted
        others = {peer: count for peer, count in self._beyond.items() if peer in admitted}
        forgotten = _FORGOTTEN_BYTES_PER_S * self._elapsed_s
        self._charged_bytes = max(float(charged_bytes), self._charged_bytes - forgotten)
        # Parts of messages lie in memory as they came.
        grown = max(0.0, grown_bytes - _WORKING_TIMES * self._charged_bytes - sum(others.values()))
        self._calm_bytes = min(grown, self._calm_bytes + _SLOW_BYTES_PER_S * self._elapsed_s)
        rise = grown - self._calm_bytes - _RISE_TIMES * sum(self._beyond.values())
        self.is_flooded = rise > _LARGE_RISE_BYTES
        most = ORDINARY_BYTES if grown > _GROWN_BYTES or rise > _RISE_BYTES else _MOST_BYTES
        suspects = {peer for peer in unadmitted if self._beyond[peer] > most}
        if self.is_flooded and not suspects and others:
            worst = max(others, key=others.__getitem__)
            suspects = {worst} if others[worst] > _MOST_BYTES else set()
        excess, self._suspects = suspects & self._suspects, suspects
        return sorted(excess)
