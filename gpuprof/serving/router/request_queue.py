"""The queue of a replica: by priority, and among equals fair to the clients.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each request gets a turn, the larger of the queue's own time and
of where the client's last request ended; the least turn goes first. A client that has sent ten requests waits behind
the first of another that has sent one. Requests whose clients allow more time than the SLO share one turn each beside
those that do not, so that what may wait does not fill the queue for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from gpuprof.serving.transport.inference import Inference

_LOOK_AHEAD = 64  # requests of another shape that are passed over to fill a batch
#: Clients whose turns are kept; beyond it those with nothing waiting are forgotten.
_MOST_CLIENTS = 4096

#: Whose turn it is: a client, and whether its request may take longer than the SLO.
Flow = tuple[str, bool]


class RequestQueue:
    """Requests in the order in which they go.

    Attributes
    ----------
    rows : int
        Of all that wait.
    """

    def __init__(self) -> None:
        self._waiting: deque[Inference] = deque()
        self._ends: dict[Flow, float] = {}
        self._time = 0.0
        self._has_overtaken = False
        self.rows = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Inference]:
        return iter(self._waiting)

    @property
    def oldest(self) -> Inference:
        """The request that goes next."""
        return self._waiting[0]

    def rows_before(self, priority: int, flow: Flow) -> int:
        """Return the rows that go before a request of this priority and flow that comes now."""
        if not self._waiting:
            return 0
        turn = self._next_turn(flow)
        if not _goes_before(priority, turn, self._waiting[-1]):
            return self.rows
        return sum(one.rows for one in self._waiting if not _goes_before(priority, turn, one))

    def add(self, inference: Inference, flow: Flow) -> None:
        """Put a request where its turn is; those that it goes before may miss their deadlines for it."""
        turn = inference.turn = self._next_turn(flow)
        self._ends[flow] = turn + inference.rows
        self.rows += inference.rows
        if not self._waiting or not _goes_before(inference.priority, turn, self._waiting[-1]):
            self._waiting.append(inference)
            return
        place = next(i for i, one in enumerate(self._waiting) if _goes_before(inference.priority, turn, one))
        self._waiting.insert(place, inference)
        self._has_overtaken = True
        for position in range(place + 1, len(self._waiting)):
            self._waiting[position].overtaken = True

    def put_first(self, inferences: Iterable[Inference], position: int = 0) -> None:
        """Put requests that were taken already before all others, behind the first ``position`` of them."""
        for number, inference in enumerate(inferences, position):
            self._waiting.insert(number, inference)
            self.rows += inference.rows

    def take(self, rows: int) -> list[Inference]:
        """Remove the first requests that can share a batch, up to ``rows`` rows."""
        first = self._waiting.popleft()
        taken = [first]
        free_rows = rows - first.rows
        if free_rows > 0 and not first.alone and self._waiting:
            kept: list[Inference] = []
            while self._waiting and free_rows > 0 and len(kept) < _LOOK_AHEAD:
                other = self._waiting.popleft()
                if other.batch_key == first.batch_key and other.rows <= free_rows and not other.alone:
                    taken.append(other)
                    free_rows -= other.rows
                else:
                    kept.append(other)
            self._waiting.extendleft(reversed(kept))
        self.rows -= sum([inference.rows for inference in taken])
        self._time = max(self._time, *[inference.turn for inference in taken])
        self._forget_flows()
        return taken

    def remove(self, which: Callable[[Inference], bool]) -> list[Inference]:
        """Remove and return the requests for which ``which`` is true."""
        gone = [inference for inference in self._waiting if which(inference)]
        if gone:
            self._waiting = deque(inference for inference in self._waiting if not which(inference))
            self.rows -= sum(inference.rows for inference in gone)
        return gone

    def remove_late(self, now: float, finish_ms: float) -> list[Inference]:
        """Remove and return the requests that others went before and that are late if answered in ``finish_ms``.

        What they would take others need, which were let in since.
        """
        if not self._has_overtaken:
            return []

        def is_late(inference: Inference) -> bool:
            is_new = inference.overtaken and not inference.attempts
            return is_new and 1000.0 * (now - inference.arrived) + finish_ms > inference.deadline_ms

        gone = self.remove(is_late)
        self._has_overtaken = any(one.overtaken for one in self._waiting)
        return gone

    def _next_turn(self, flow: Flow) -> float:
        return max(self._time, self._ends.get(flow, 0.0))

    def _forget_flows(self) -> None:
        """Forget where clients ended that have nothing waiting, which is the same for them."""
        if not self._waiting:
            self._ends.clear()
            self._time = 0.0
        elif len(self._ends) > _MOST_CLIENTS:
            self._ends = {flow: end for flow, end in self._ends.items() if end > self._time}


def _goes_before(priority: int, turn: float, other: Inference) -> bool:
    """Return whether a new request of this priority and turn goes before one that waits."""
    return priority < other.priority or (priority == other.priority and turn < other.turn)
