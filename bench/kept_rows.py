"""What a long bench has found so far, a JSON line each, so that a run that is cut off goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


class KeptRows:
    """Rows by a key of text, kept in a file where one is given.

    Parameters
    ----------
    path : Path or None
        Read at the start if it is there; each new row is appended. None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[str, Row] = {}
        if path is not None and path.is_file():
            lines = path.read_text().splitlines(keepends=True)
            whole = [json.loads(line) for line in lines if line.endswith("\n")]
            self._rows = {line["key"]: line["row"] for line in whole}
            if len(whole) < len(lines):  # the last one was cut off while it was written
                path.write_text("".join(lines[: len(whole)]))

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get_or_make(self, key: str, make: Callable[[], Row]) -> Row:
        """Return the row of a key, made now if it was not kept before."""
        if key not in self._rows:
            row = self._rows[key] = make()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"key": key, "row": row}) + "\n")
        return self._rows[key]
