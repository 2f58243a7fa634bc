"""Caches, in the kernel database's directory, the names of outputs that mix the items of a batch."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from gpuprof.errors import GpuprofError

#: Below the database: a file for each model's content.
DIRECTORY = ".batched"


class BatchVerdicts:
    """Results of the test whether a model may batch several requests, by the hash of the model's content.

    ``database``: the kernel database; None: results are kept in memory only.
    """

    def __init__(self, database: Path | None) -> None:
        self._directory = None if database is None else database / DIRECTORY
        self._known: dict[str, str | None] = {}
        self._unsaved: set[str] = set()

    def mixed_output(self, sha256: str | None) -> str | None:
        """Return the stored result of `gpuprof.runtime.batch_items.find_mixed_output`; None, too, if unknown."""
        return self._known[sha256] if sha256 and self._is_known(sha256) else None

    def judge(self, path: Path, sha256: str) -> str | None:
        """Return the same result, running the model if necessary; None, too, if the model cannot be run here."""
        from gpuprof.runtime.batch_items import find_mixed_output

        if not self._is_known(sha256):
            try:
                mixed_output = find_mixed_output(path)
            except GpuprofError:
                return None
            self.keep(sha256, mixed_output)
        return self._known[sha256]

    def keep(self, sha256: str, mixed: str | None) -> None:
        """Record the result for a file's content."""
        self._known[sha256] = mixed
        self._unsaved.add(sha256)
        self.save()

    def save(self) -> None:
        """Write new results if there is a database; unwritable results stay in memory."""
        if self._directory is None or not self._directory.parent.is_dir():
            return
        for sha256 in sorted(self._unsaved):
            with suppress(OSError):
                self._directory.mkdir(exist_ok=True)
                # In the same directory, since a rename is atomic only within a file system.
                handle, name = tempfile.mkstemp(dir=self._directory, prefix=".tmp-")
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"mixed": self._known[sha256]}, file)
                Path(name).replace(self._directory / f"{sha256}.json")
                self._unsaved.discard(sha256)

    def _is_known(self, sha256: str) -> bool:
        if sha256 not in self._known and self._directory is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                verdict = json.loads((self._directory / f"{sha256}.json").read_text(encoding="utf-8"))["mixed"]
                self._known[sha256] = None if verdict is None else str(verdict)
        return sha256 in self._known


def describe_mixing(model: str, output: str) -> str:
    """Return the reason found by `find_mixed_output` why requests for a model do not share a batch."""
    if output.startswith(("input ", "output ")):
        return (
            f"{model} cannot have several requests in one batch: the first dimension alone of its {output} must be "
            "the batch"
        )
    return f"{model} mixes the items of a batch: its output {output} for one depends on the others"
