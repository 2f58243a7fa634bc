"""Which calls of a connection are open, and whose turn it is: the client's or the server's."""

from __future__ import annotations

#: More than a server lets a connection have at once, and than clients begin before they know how many.
_MOST_OPEN = 4096
#: What a call waits for: the rest of the request; the answer; the rest of the answer.
_REQUEST, _ANSWER, _REST = range(3)


class OpenCalls:
    """Follows the calls of one connection of HTTP/2, each by the number of its stream.

    A call is the server's turn from the end of its request to the beginning of its answer. Afterwards it may be the
    client that does not read.

    Attributes
    ----------
    has_moved : bool
        Whether a part of a call has come, from either side, since it was set to False.
    begun : int
        Calls that have begun so far.

    Examples
    --------
    >>> calls = OpenCalls()
    >>> calls.begin(1), calls.is_computing
    (True, False)
    >>> calls.finish(1)
    >>> calls.is_computing
    True
    >>> calls.answer(1, is_last=False)
    >>> calls.is_computing, len(calls)
    (False, 1)
    """

    __slots__ = ("_computing", "_highest", "_states", "begun", "has_moved")

    def __init__(self) -> None:
        self._states: dict[int, int] = {}
        self._highest = self._computing = self.begun = 0
        self.has_moved = False

    def __len__(self) -> int:
        return len(self._states)

    @property
    def is_computing(self) -> bool:
        """Whether a call has come whole of which no answer has begun."""
        return self._computing > 0

    def is_new(self, stream: int) -> bool:
        """Return whether the next head of this stream begins a call."""
        return stream > self._highest

    def begin(self, stream: int) -> bool:
        """Note the head of a call, or what stands behind its data; False where there are too many calls."""
        if stream > self._highest:
            self._highest = stream
            self.begun += 1
            self._states[stream] = _REQUEST
        return len(self._states) <= _MOST_OPEN

    def finish(self, stream: int) -> None:
        """Note the end of a request."""
        if self._states.get(stream) == _REQUEST:
            self._states[stream] = _ANSWER
            self._computing += 1

    def answer(self, stream: int, is_last: bool) -> None:
        """Note a part of an answer."""
        self.has_moved = True
        if is_last:
            self.forget(stream)
        elif (state := self._states.get(stream, _REST)) != _REST:
            self._computing -= state == _ANSWER
            self._states[stream] = _REST

    def forget(self, stream: int) -> None:
        """Note that a call has ended."""
        self._computing -= self._states.pop(stream, _REST) == _ANSWER
