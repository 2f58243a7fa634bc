"""Whose calls grpcio is given next where it has not begun with those that it has been given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

#: So many calls are given to grpcio between two questions, and so many questions may wait for their answers. It begins
#: with calls in the order in which they come, and cancels some, whoever's they are, where a thousand wait.
_CALLS_PER_QUESTION, _MOST_ASKED = 32, 2
#: Of a connection that has waited, before another of its client or of others has its turn.
_CALLS_PER_TURN = 4


class WaitingConnection(Protocol):
    """A connection on which a call cannot begin yet."""

    @property
    def peer(self) -> str:
        """Whose it is."""
        ...

    def take_turn(self, room: int) -> None:
        """Begin so many calls at most."""
        ...


class CallTurns:
    """Lets clients begin calls at once, and in turn where grpcio is behind: nobody's calls wait for all of another's.

    How far grpcio has come is known from a question that it answers when it has begun with the calls before it.

    Parameters
    ----------
    ask : callable
        Asks grpcio; `note_answer` is to be called when it answers.

    Examples
    --------
    >>> asked = []
    >>> turns = CallTurns(lambda: asked.append("?"))
    >>> turns.find_room("somebody")
    64
    >>> turns.begin(64)
    >>> len(asked), turns.find_room("somebody")
    (2, 0)
    >>> turns.note_answer()
    >>> turns.find_room("somebody")
    32
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._begun = self._asked = 0
        self._waiting: dict[str, deque[WaitingConnection]] = {}

    @property
    def _room(self) -> int:
        return (_MOST_ASKED - self._asked) * _CALLS_PER_QUESTION - self._begun

    def find_room(self, peer: str) -> int:
        """Return how many calls a connection of this client may begin that has not waited for its turn."""
        return 0 if peer in self._waiting else max(0, self._room)

    def begin(self, count: int) -> None:
        """Note that grpcio has been given so many calls."""
        self._begun += count
        while self._begun >= _CALLS_PER_QUESTION and self._asked < _MOST_ASKED:
            self._begun -= _CALLS_PER_QUESTION
            self._asked += 1
            self._ask()

    def note_answer(self) -> None:
        """Note that grpcio has begun with the calls before a question."""
        self._asked = max(0, self._asked - 1)

    def wait(self, connection: WaitingConnection) -> None:
        """Have a connection take its turn when it comes."""
        self._waiting.setdefault(connection.peer, deque()).append(connection)

    def forget(self, connection: WaitingConnection) -> None:
        """Leave a connection out that waits."""
        waiting = self._waiting.get(connection.peer)
        if waiting is not None and connection in waiting:
            waiting.remove(connection)
            if not waiting:
                del self._waiting[connection.peer]

    def give_turns(self) -> None:
        """Let connections that wait take their turns, as far as there is room: of each client in turn the first."""
        while self._waiting and self._room > 0:
            peer = next(iter(self._waiting))
            waiting = self._waiting.pop(peer)
            connection = waiting.popleft()
            if waiting:
                self._waiting[peer] = waiting
            connection.take_turn(min(self._room, _CALLS_PER_TURN))
