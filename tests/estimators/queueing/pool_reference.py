"""A plain simulation of replicas behind one router, written for the tests: it shares no code with the model."""

import heapq
import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.sojourn import BatchServer


class _Replica:
    def __init__(self, server: BatchServer) -> None:
        self.server = server
        self.queue: deque[int] = deque()
        self.ends = [0.0] * server.processes  # when each process is expected to be done
        self.running = [False] * server.processes
        self.rested = [0.0] * server.processes
        self.recent, self.counted, self.coming = 0.0, 0.0, 0  # arrivals, of which older ones weigh less

    def fade(self, now: float) -> float:
        """Return how many arrivals there were of late, over about ten full batches."""
        return self.recent * math.exp(-(now - self.counted) / (10.0 * self.server.latency_ms[-1]))

    def answer_at(self, now: float, oldest: float) -> float:
        """Return when a request that joins now would be answered, if every batch took its mean time."""
        times, size = self.server.latency_ms, self.server.batch
        ready = sorted(max(end, now) if busy else now for end, busy in zip(self.ends, self.running, strict=True))
        full, place = divmod(len(self.queue), size)
        start = ready[0]
        if full:
            start = max(start, now + (sum(ready) - len(ready) * now + full * times[size - 1]) / len(ready))
        holds = place + 1 if not all(self.running) else max(place + 1, self.coming)
        if holds < size:
            first = oldest if place and not full else now
            start = max(start, first + self.server.max_wait_ms)
        return start + times[min(holds, size) - 1]


def play_pool(
    arrived_ms: NDArray[np.float64], servers: Sequence[BatchServer], seed: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return each request's time in the system, ms, and the replica that answered it.

    A request goes to the replica expected to answer first, any of equal ones. A free process takes the oldest
    requests, as many as a batch holds, once there are so many or the oldest has waited long enough.
    """
    random = np.random.default_rng(seed)
    replicas = [_Replica(server) for server in servers]
    spent, by = np.zeros(len(arrived_ms)), np.zeros(len(arrived_ms), np.int64)
    events: list[tuple[float, int, int, int]] = []  # time, replica, process (-1: look again), order
    order = 0

    def look(number: int, now: float) -> None:
        nonlocal order
        queue = replicas[number]
        server = queue.server
        while queue.queue and not all(queue.running):
            waits = arrived_ms[queue.queue[0]] + server.max_wait_ms
            if len(queue.queue) < server.batch and now < waits:
                order += 1
                heapq.heappush(events, (waits, number, -1, order))
                return
            process = queue.running.index(False)
            taken = [queue.queue.popleft() for _ in range(min(server.batch, len(queue.queue)))]
            cold = now > queue.rested[process]
            cv = server.pause_cv if cold and server.pause_cv is not None else server.latency_cv
            mean = server.latency_ms[len(taken) - 1]
            time = mean * (random.gamma(1.0 / cv**2, cv**2) if cv else 1.0) * (server.pause_factor if cold else 1.0)
            queue.running[process], queue.ends[process] = True, now + mean
            expected = queue.fade(now) * mean / (10.0 * server.latency_ms[-1] * server.processes)
            queue.coming = min(server.batch, int(expected + expected**0.5 + 0.5))
            for request in taken:
                spent[request], by[request] = now + time - arrived_ms[request] + server.overhead_ms, number
            order += 1
            heapq.heappush(events, (now + time, number, process, order))

    def settle(now: float) -> None:
        while events and events[0][0] <= now:
            time, number, process, _ = heapq.heappop(events)
            if process >= 0:
                replicas[number].running[process] = False
                replicas[number].rested[process] = time
            look(number, time)

    for request, now in enumerate(arrived_ms.tolist()):
        settle(now)
        answers = [
            replica.answer_at(now, arrived_ms[replica.queue[0]] if replica.queue else now) for replica in replicas
        ]
        best = min(answers)
        chosen = random.choice([number for number, when in enumerate(answers) if when <= best + 1e-9])
        replicas[chosen].recent, replicas[chosen].counted = 1.0 + replicas[chosen].fade(now), now
        replicas[chosen].queue.append(request)
        look(int(chosen), now)
    settle(float("inf"))
    return spent, by
