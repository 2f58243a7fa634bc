"""Hashes files in a background thread: for half a gigabyte, hashing takes as long as all other reading."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

from gpuprof.errors import InputError

#: Bytes per read, since a file may be larger than memory.
_CHUNK = 2**22
#: Least size for a thread: smaller files are hashed faster than a thread starts.
_SMALL_BYTES = 2**20


class ContentHash:
    """SHA-256 of the concatenation of files, computed in a background thread from construction on."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._found: str | None = None
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        if sum(path.stat().st_size for path in self._paths) > _SMALL_BYTES:
            self._thread = threading.Thread(target=self._compute, name="hash", daemon=True)
            self._thread.start()
        else:
            self._compute()  # the file may change later

    @property
    def sha256(self) -> str:
        """Hash in hexadecimal digits. Raises `InputError` if a file can no longer be read."""
        try:
            return self.wait_for_digest()
        except OSError as error:
            raise InputError(f"cannot read model {self._paths[0]}: {error.strerror}") from error

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ContentHash) and self.sha256 == other.sha256)

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __getstate__(self) -> dict[str, object]:
        return {"_paths": self._paths, "_found": self.sha256, "_error": None, "_thread": None}  # threads do not pickle

    def wait_for_digest(self) -> str:
        """Wait for the hash and return its hexadecimal digits.

        Raises `OSError` when a file cannot be read.
        """
        if self._thread is not None:
            self._thread.join()
        if self._found is None:
            self._compute()  # in a forked process, which lacks the thread
        if self._found is None:
            raise self._error or OSError("no hash")
        return self._found

    def _compute(self) -> None:
        digest = hashlib.sha256()
        try:
            for path in self._paths:
                with path.open("rb") as stream:
                    while chunk := stream.read(_CHUNK):
                        digest.update(chunk)
        except OSError as error:
            self._error = error
        else:
            self._found = digest.hexdigest()
