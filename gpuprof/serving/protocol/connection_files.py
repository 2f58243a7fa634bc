"""The connections to a port of this process, as the system knows them: who is there, and how much each has sent.

A look must be over in milliseconds where somebody floods the port, when every thread that wants Python's lock waits for
it, up to 5 ms each time. So the C library is called without giving the lock up, and nothing that may wait is called.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

from gpuprof.serving.protocol.grpc_connection_bytes import Peer

#: Of asm-generic/socket.h: what tells a socket from all others; lets the system size a buffer again (Linux 5.14).
_SO_COOKIE, _SO_BUF_LOCK = 57, 72
#: A filter of arrivals (classic BPF), and one that drops all: it keeps no byte of a packet.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _DROP_ALL = 26, 27, struct.pack("HBBI", 0x06, 0, 0, 0)
#: `tcpi_bytes_received` of the system's ``struct tcp_info`` (linux/tcp.h), 64 bits.
_RECEIVED = slice(128, 136)
#: How an IPv4 address appears at a socket of IPv6 (RFC 4291, 2.5.5.2), and a buffer for an address of either.
_MAPPED, _ADDRESS_BYTES = "::ffff:", 28
_F_GETFD, _FAILED = 1, -1
#: The system gives out the lowest number that is free: behind so many free ones there are hardly any files.
_MOST_FREE = 256
#: The least that a listening socket can have for its connections; and what one has that is admitted, at first.
_NARROW_BYTES, _WIDE_BYTES, _MOST_WINDOW_BYTES = 1, 1 << 20, 1 << 24


class ConnectionFiles:
    """Finds the connections to a port. Each thread needs one of its own.

    Parameters
    ----------
    port : int
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._library = ctypes.PyDLL(None)
        self._files: dict[Peer, int] = {}
        self._known: dict[bytes, Peer | None] = {}
        self._listening: list[int] = []
        self._cookie, self._info = ctypes.create_string_buffer(8), ctypes.create_string_buffer(_RECEIVED.stop)
        self._address = ctypes.create_string_buffer(_ADDRESS_BYTES)
        self._size = ctypes.c_uint()

    def look(self) -> dict[Peer, int]:
        """Return how many bytes each connection has received."""
        known: dict[bytes, Peer | None] = {}
        received: dict[Peer, int] = {}
        files: dict[Peer, int] = {}
        for file in range(self._highest() + 1):
            if not self._read_option(file, socket.SOL_SOCKET, _SO_COOKIE, self._cookie):
                continue
            cookie = self._cookie.raw
            peer = known[cookie] = self._known[cookie] if cookie in self._known else self._find_peer(file)
            if peer and self._read_option(file, socket.IPPROTO_TCP, socket.TCP_INFO, self._info):
                files[peer], received[peer] = file, int.from_bytes(self._info.raw[_RECEIVED], sys.byteorder)
        self._known, self._files = known, files
        return received

    def shut_down(self, peer: Peer) -> bool:
        """Shut a connection down as it was last found, unless its file has become another's meanwhile."""
        file = self._files.get(peer, _FAILED)
        if not self._is_at(file, peer):
            return False
        # Or a client whose window is closed would not be told for a minute that nobody is there any more.
        self._library.setsockopt(file, socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0), 8)
        return not self._library.shutdown(file, socket.SHUT_RDWR)

    def narrow(self) -> None:
        """Have the system receive as little ahead as it can from those who connect from now on.

        To be called when the port listens, which it then does for as long as there is `pause`.
        """
        for file in range(self._highest() + 1):
            if self._read_address(self._library.getsockname, file)[1] == self._port and not self._find_peer(file):
                self._listening.append(file)
                # Left locked, it would also keep the window that is agreed upon below 64 KiB for good.
                if self._set_option(file, socket.SOL_SOCKET, _SO_BUF_LOCK, 0):
                    self._set_option(file, socket.SOL_SOCKET, socket.SO_RCVBUF, _NARROW_BYTES)
                    self._set_option(file, socket.SOL_SOCKET, _SO_BUF_LOCK, 0)

    def pause(self) -> None:
        """Have the system drop what comes from those who connect; they try again after a second."""
        program = ctypes.create_string_buffer(_DROP_ALL)
        told = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))
        for file in self._listening:
            self._library.setsockopt(file, socket.SOL_SOCKET, _SO_ATTACH_FILTER, told, 16)

    def resume(self) -> None:
        """Let clients connect again; one that was about to when this was called has inherited the filter."""
        for file in (*self._listening, *self._files.values()):
            self._set_option(file, socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def widen(self, peer: Peer) -> bool:
        """Have the system receive as much ahead as it does of itself; False where there is no such connection."""
        file = self._files.get(peer, _FAILED)
        if not self._is_at(file, peer):
            return False
        self._set_option(file, socket.SOL_SOCKET, socket.SO_RCVBUF, _WIDE_BYTES)
        self._set_option(file, socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, _MOST_WINDOW_BYTES)
        self._set_option(file, socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
        return True

    def hold(self, peer: Peer) -> bool:
        """Have the system receive as little ahead as it can, until `widen`; False where there is no such connection."""
        file = self._files.get(peer, _FAILED)
        return self._is_at(file, peer) and self._set_option(file, socket.SOL_SOCKET, socket.SO_RCVBUF, _NARROW_BYTES)

    def _highest(self) -> int:
        """Return the highest number that a file of this process has."""
        highest = max(self._files.values(), default=0)
        file = highest + 1
        while file <= highest + _MOST_FREE:
            if self._library.fcntl(file, _F_GETFD) != _FAILED:
                highest = file
            file += 1
        return highest

    def _read_option(self, file: int, level: int, option: int, buffer: ctypes.Array[ctypes.c_char]) -> bool:
        self._size.value = len(buffer)
        return not self._library.getsockopt(file, level, option, buffer, ctypes.byref(self._size))

    def _set_option(self, file: int, level: int, option: int, value: int) -> bool:
        number = ctypes.c_int(value)
        return not self._library.setsockopt(file, level, option, ctypes.byref(number), ctypes.sizeof(number))

    def _find_peer(self, file: int) -> Peer | None:
        """Return who is at the other end of a file that is a connection to the port."""
        if self._read_address(self._library.getsockname, file)[1] != self._port:
            return None
        address, port = self._read_address(self._library.getpeername, file)
        return (address, port) if port else None

    def _is_at(self, file: int, peer: Peer) -> bool:
        return self._read_address(self._library.getpeername, file) == peer

    def _read_address(self, call: Callable[..., int], file: int) -> Peer:
        """Return the address and port that a function of the C library gives, port 0 where it is none of TCP's."""
        self._size.value = _ADDRESS_BYTES
        if not call(file, self._address, ctypes.byref(self._size)):
            raw = self._address.raw
            family = int.from_bytes(raw[:2], sys.byteorder)
            text = ""
            with suppress(ValueError):
                if family == socket.AF_INET:
                    text = socket.inet_ntop(socket.AF_INET, raw[4:8])
                elif family == socket.AF_INET6:
                    text = socket.inet_ntop(socket.AF_INET6, raw[8:24]).removeprefix(_MAPPED)
            if text:
                return text, int.from_bytes(raw[2:4], "big")
        return "", 0
