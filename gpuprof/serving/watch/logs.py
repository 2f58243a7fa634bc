"""The server's log: a line per event on stderr, as text for people or as JSON for programs."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Literal

LOGGER = logging.getLogger("gpuprof.serving")
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class TextFormatter(logging.Formatter):
    """``12:34:56 warning: worker died (worker m/0.0, in_s 0.1)``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = ", ".join(f"{key} {value}" for key, value in _extras(record).items())
        return f"{time} {record.levelname.lower()}: {record.getMessage()}" + (f" ({fields})" if fields else "")


class JsonFormatter(logging.Formatter):
    """Formatter of JSON objects: ``time`` (ISO 8601, UTC), ``level``, ``event`` and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        fields = {"time": time, "level": record.levelname.lower(), "event": record.getMessage(), **_extras(record)}
        return json.dumps(fields, default=str, ensure_ascii=False)


FORMATTERS: dict[str, type[TextFormatter] | type[JsonFormatter]] = {"text": TextFormatter, "json": JsonFormatter}


def configure_logging(form: Literal["text", "json"]) -> None:
    """Send the server's log to stderr: as text only warnings, as JSON also information, which programs filter."""
    logging.raiseExceptions = False  # the log's destination may be full; serving continues
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[form]())
    LOGGER.handlers[:] = [handler]
    LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO if form == "json" else logging.WARNING)


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}
