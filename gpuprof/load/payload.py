"""A request's bytes, which are sent repeatedly; a large payload is sent without copies.

Next to workers whose models fill the caches, copying half a megabyte for each request takes more CPU time than the
rest of the client. Where the caches are free, as between a client and a null model, copying is faster.
"""

from __future__ import annotations

import os
import socket

#: Smaller ones are copied sooner than the kernel finds their pages.
LARGE_BYTES = 1 << 16


class Payload:
    """The bytes of a request.

    ``copied``: whether a large payload is copied as well; TLS requires it, since it must read the bytes.
    """

    def __init__(self, data: bytes, copied: bool = False) -> None:
        self.size = len(data)
        self._data = memoryview(data)
        self._file: int | None = None
        if self.size > LARGE_BYTES and not copied:
            self._file = os.memfd_create("gpuprof-request", os.MFD_CLOEXEC)
            left = self._data
            while left:
                left = left[os.write(self._file, left) :]

    def send(self, to: socket.socket, position: int) -> int:
        """Send from ``position`` on; return the number of bytes sent. Raises `OSError` as the socket does."""
        if self._file is None:
            return to.send(self._data[position:])
        return os.sendfile(to.fileno(), self._file, position, self.size - position)

    def close(self) -> None:
        """Free the memory."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
