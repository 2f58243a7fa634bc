"""How many header fields of a call are made into Python objects.

grpcio holds the head of a call to `grpc.absolute_max_metadata_size` once the client has acknowledged the server's
settings. Before, which may be never, a head may have 16 MiB, counted as HTTP/2 does: half a million fields, each of
which may take one byte on the wire. No token is needed for it, and no end: what a connection that is closed leaves of a
head is handed over, too. grpcio then makes an object of each field while nobody else runs Python.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from grpc._cython import cygrpc

from gpuprof.serving.transport.inference import RefusedError

#: What makes an object of a field in grpcio, 1.80 to 1.85; there is no public way to limit how many are made.
_MAKER = "_Metadatum"


class TooManyFieldsError(Exception):
    """A head has more fields than it may have."""


class HeadFields:
    """Makes the fields of heads for grpcio, up to so many of each.

    All fields of a head are made in one go, and `end_head` is called after them.
    """

    def __init__(self) -> None:
        self._most = 0
        self._made = 0
        self._count_refusal: Callable[[RefusedError], object] = lambda refusal: None

    def limit(self, most: int, count_refusal: Callable[[RefusedError], object]) -> None:
        """Have grpcio make at most so many fields of a head, in the whole process; where it makes them otherwise, all.

        Parameters
        ----------
        most : int
        count_refusal : callable
            Told of each head that has more.
        """
        self._most, self._count_refusal = most, count_refusal
        if hasattr(cygrpc, _MAKER):
            setattr(cygrpc, _MAKER, self.make_field)
            logging.getLogger(cygrpc.__name__).addFilter(_is_to_be_logged)

    def make_field(self, name: str, value: str | bytes) -> tuple[str, str | bytes]:
        """Return a field.

        Raises
        ------
        TooManyFieldsError
            When its head has too many. grpcio then ends the call.
        """
        self._made += 1
        if self._made > self._most:
            self._made = 0
            text = f"a call may have at most {self._most} header fields"
            self._count_refusal(RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text, reason="header fields"))
            raise TooManyFieldsError(text)
        return name, value

    def end_head(self) -> None:
        """Count from the beginning: the fields that are made next are of another head."""
        self._made = 0

    def read(self, context: Any) -> tuple[tuple[str, str | bytes], ...]:
        """Return the fields of a call that was admitted, made anew."""
        self.end_head()
        fields: tuple[tuple[str, str | bytes], ...] = context.invocation_metadata() or ()
        self.end_head()
        return fields


#: grpcio makes the fields of all servers of a process in the same way.
HEAD_FIELDS = HeadFields()


def _is_to_be_logged(record: logging.LogRecord) -> bool:
    """Return whether what grpcio logs is no refusal of a head: clients could fill the log with these."""
    return record.exc_info is None or not isinstance(record.exc_info[1], TooManyFieldsError)
