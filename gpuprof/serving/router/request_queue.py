"""The queue of a replica: by priority, and fair to the clients within a priority.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each request gets a start tag, the larger of the queue's
virtual time and the finish tag of its flow's last request; the smallest start tag is served first. So the tenth
request of one client waits behind the first of another. A client's requests with a deadline longer than the SLO form
a flow of their own, so that they do not delay the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from gpuprof.serving.transport.inference import Inference

#: A flow of fair queueing: a client, and whether its request may take longer than the SLO.
Flow = tuple[str, bool]


class RequestQueue:
    """Waiting requests in the order of service.

    Attributes
    ----------
    rows : int
        Rows of all waiting requests.
    """

    def __init__(self) -> None:
        self._waiting: deque[Inference] = deque()
        self._finish_tags: dict[Flow, float] = {}
        self._virtual_time = 0.0
        self._has_overtaken = False
        self.rows = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Inference]:
        return iter(self._waiting)

    @property
    def oldest(self) -> Inference:
        """The first request in the order of service."""
        return self._waiting[0]

    def rows_before(self, priority: int, flow: Flow) -> int:
        """Return the batch rows ahead of a new request of this priority and flow."""
        if not self._waiting:
            return 0
        start_tag = self._compute_start_tag(flow)
        if not _is_before(priority, start_tag, self._waiting[-1]):
            return self.rows
        return sum(queued.rows for queued in self._waiting if not _is_before(priority, start_tag, queued))

    def add(self, inference: Inference, flow: Flow) -> None:
        """Insert a request at its position; the requests behind it may now miss their deadlines."""
        start_tag = inference.start_tag = self._compute_start_tag(flow)
        self._finish_tags[flow] = start_tag + inference.rows
        self.rows += inference.rows
        if not self._waiting or not _is_before(inference.priority, start_tag, self._waiting[-1]):
            self._waiting.append(inference)
            return
        position = next(i for i, entry in enumerate(self._waiting) if _is_before(inference.priority, start_tag, entry))
        self._waiting.insert(position, inference)
        self._has_overtaken = True
        for later in range(position + 1, len(self._waiting)):
            self._waiting[later].overtaken = True

    def put_first(self, inferences: Iterable[Inference], position: int = 0) -> None:
        """Insert requests at the head of the queue, regardless of tags, behind the first ``position`` requests."""
        for place, inference in enumerate(inferences, position):
            self._waiting.insert(place, inference)
            self.rows += inference.rows

    def take(self, rows: int) -> list[Inference]:
        """Remove and return the first requests that can share a batch, up to ``rows`` rows."""
        first = self._waiting.popleft()
        batch = [first]
        free_rows = rows - first.rows
        if free_rows > 0 and not first.alone and self._waiting:
            passed_over: list[Inference] = []
            while self._waiting and free_rows > 0 and len(passed_over) < 64:
                candidate = self._waiting.popleft()
                if candidate.batch_key == first.batch_key and candidate.rows <= free_rows and not candidate.alone:
                    batch.append(candidate)
                    free_rows -= candidate.rows
                else:
                    passed_over.append(candidate)
            self._waiting.extendleft(reversed(passed_over))
        self.rows -= sum([inference.rows for inference in batch])
        self._virtual_time = max(self._virtual_time, *[inference.start_tag for inference in batch])
        self._forget_flows()
        return batch

    def remove(self, condition: Callable[[Inference], bool]) -> list[Inference]:
        """Remove and return the requests for which ``condition`` is true."""
        removed = [inference for inference in self._waiting if condition(inference)]
        if removed:
            self._waiting = deque(inference for inference in self._waiting if not condition(inference))
            self.rows -= sum(inference.rows for inference in removed)
        return removed

    def remove_late(self, now: float, finish_ms: float) -> list[Inference]:
        """Remove and return the overtaken requests that would be late if answered in ``finish_ms``.

        Their capacity is needed for requests admitted later.
        """
        if not self._has_overtaken:
            return []

        def is_late(inference: Inference) -> bool:
            is_new = inference.overtaken and not inference.attempts
            return is_new and 1000.0 * (now - inference.arrived) + finish_ms > inference.deadline_ms

        late = self.remove(is_late)
        self._has_overtaken = any(queued.overtaken for queued in self._waiting)
        return late

    def _compute_start_tag(self, flow: Flow) -> float:
        return max(self._virtual_time, self._finish_tags.get(flow, 0.0))

    def _forget_flows(self) -> None:
        """Forget the finish tags of flows without waiting requests, which have no effect."""
        if not self._waiting:
            self._finish_tags.clear()
            self._virtual_time = 0.0
        elif len(self._finish_tags) > 2 * len(self._waiting):  # so that a request pays for a few tags at most
            self._finish_tags = {flow: end for flow, end in self._finish_tags.items() if end > self._virtual_time}


def _is_before(priority: int, start_tag: float, queued: Inference) -> bool:
    """Return whether a new request of this priority and start tag is served before a waiting request."""
    return priority < queued.priority or (priority == queued.priority and start_tag < queued.start_tag)
