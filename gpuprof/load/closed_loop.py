"""A closed loop: every answer releases the next request, and sequences keep their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

Chain = tuple[int, ...]


class ClosedLoop:
    """Keeps a constant number of requests of each model in flight.

    Parameters
    ----------
    in_flight : sequence of int
        Number of requests in flight, by model.
    chains : sequence of sequence of tuple of int
        By model, the positions of the requests of each sequence. There must be at least as many sequences as requests
        in flight, so that no sequence is sent twice at the same time. Empty: requests without sequences.
    """

    def __init__(self, in_flight: Sequence[int], chains: Sequence[Sequence[Chain]] = ()) -> None:
        self._free = [deque(chain) for chain in chains] or [deque[Chain]() for _ in in_flight]
        self._count = 0
        self._due: list[tuple[float, int, int, Chain, int]] = []
        self._on_way: dict[int, tuple[int, Chain, int]] = {}
        for model, count in enumerate(in_flight):
            for _ in range(count):
                self._add(0.0, model)

    def _add(self, at_s: float, model: int, chain: Chain = (), step: int = 0) -> None:
        self._count += 1
        heappush(self._due, (at_s, self._count, model, chain, step))

    def take(self, number: int, now_s: float) -> tuple[int, int | None] | None:
        """Return the model of request ``number``, due now, and the position of its payload; None: no request is due.

        The position is None for requests without a sequence: the model's next payload is sent.
        """
        if not self._due or self._due[0][0] > now_s:
            return None
        _, _, model, chain, step = heappop(self._due)
        if not chain and self._free[model]:
            chain, step = self._free[model].popleft(), 0
        self._on_way[number] = model, chain, step
        return model, chain[step] if chain else None

    def finish(self, number: int, next_s: float, is_answered: bool) -> None:
        """Let the next request go at ``next_s``; a sequence with an unanswered request restarts later."""
        model, chain, step = self._on_way.pop(number)
        if chain and (not is_answered or step + 1 == len(chain)):
            self._free[model].append(chain)
            chain = ()
        self._add(next_s, model, chain, step + 1)
