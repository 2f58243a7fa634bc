"""How many header fields of a call are made into Python objects.

grpcio hands over heads of any number of fields where the client has not acknowledged the server's settings, and what a
connection that is closed leaves of one. It makes two strings and an object of each field, half a million in 0.6 s,
while nobody else runs Python. Fields far beyond those that a head may have become one and the same object, in a quarter
of the time.
"""

from __future__ import annotations

from collections.abc import Sized

from grpc._cython import cygrpc

#: What makes an object of a field in grpcio, 1.80 to 1.85; there is no public way to limit how many are made.
_MAKER = "_Metadatum"
#: HTTP/2 counts 32 bytes for a field beside its name and value (RFC 9113, 6.5.2): no head of 16 KiB has more.
MAX_FIELDS = 512
#: Made between two heads; what is made elsewhere in the process, for a client's answers, counts too.
_MOST_MADE = 8 * MAX_FIELDS
_ONE_TOO_MANY = ("x-one-field-too-many", "")


class HeadFields:
    """Makes the fields of heads for grpcio: all of a head in one go, and then `are_too_many` is asked."""

    def __init__(self) -> None:
        self._made = 0

    def limit(self) -> None:
        """Have grpcio make fields here, in the whole process; where it makes them otherwise, nothing changes."""
        if hasattr(cygrpc, _MAKER):
            setattr(cygrpc, _MAKER, self.make_field)

    def make_field(self, name: str, value: str | bytes) -> tuple[str, str | bytes]:
        """Return a field."""
        self._made += 1
        return (name, value) if self._made <= _MOST_MADE else _ONE_TOO_MANY

    def are_too_many(self, fields: Sized) -> bool:
        """Return whether a head has more fields than it may have, and make those of the next anew."""
        self._made = 0
        return len(fields) > MAX_FIELDS


#: grpcio makes the fields of all servers and clients of a process in the same way.
HEAD_FIELDS = HeadFields()
