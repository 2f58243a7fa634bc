"""The rules of the runtime played through as plainly as can be, with the runtime's own objects, to compare with."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuprof.domain.deployment import Replica
from gpuprof.rules.batching import batch_size_now
from gpuprof.rules.routing import FastestFirst, ReplicaLoad, decay_count, forecast_joining


@dataclass
class ReferenceServer:
    """One replica: its queue of (arrival, request) and when each process is free."""

    replica: Replica
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    free_at: list[int] = field(default_factory=list)
    idle: list[bool] = field(default_factory=list)
    count: float = 0.0
    counted_at: int = 0
    joining: int = 0

    def load(self, now: int) -> ReplicaLoad:
        oldest = (now - self.queue[0][0]) * 1e-6 if self.queue else 0.0
        busy = tuple(max(0, t - now) * 1e-6 for t in self.free_at)
        assert self.replica.batch_latency_ms is not None
        idle, times = sum(self.idle), self.replica.batch_latency_ms
        joining = 0 if idle else self.joining
        return ReplicaLoad(len(self.queue), oldest, busy, times, self.replica.max_wait_ms, idle, joining)

    def count_arrivals(self, now: int) -> float:
        assert self.replica.batch_latency_ms is not None
        return decay_count(self.count, (now - self.counted_at) * 1e-6, self.replica.batch_latency_ms[-1])

    def begin(self, size: int, now: int) -> None:
        times = self.replica.batch_latency_ms
        assert times is not None
        count = self.count_arrivals(now)
        self.joining = forecast_joining(count, times[size - 1], times, len(self.idle), 0.0, math.inf)


def play(replicas: Sequence[Replica], arrivals: Sequence[int], rule: FastestFirst) -> list[int]:
    """Return when each request is answered, all of one model, without randomness; times in nanoseconds."""
    servers = [ReferenceServer(r, free_at=[0] * r.processes, idle=[True] * r.processes) for r in replicas]
    first_process = [sum(r.processes for r in replicas[:i]) for i in range(len(replicas))]
    events: list[tuple[int, int, int]] = [(time, 2, i) for i, time in enumerate(arrivals)]
    heapq.heapify(events)
    answered = [0] * len(arrivals)

    def start(s: int, now: int) -> None:
        server, replica = servers[s], replicas[s]
        assert replica.batch_latency_ms is not None
        while any(server.idle) and server.queue:
            limit = round(replica.max_wait_ms * 1e6)
            over = now - server.queue[0][0] >= limit
            waited = (
                replica.max_wait_ms if over else min((now - server.queue[0][0]) * 1e-6, replica.max_wait_ms * 0.999999)
            )
            size = batch_size_now(len(server.queue), replica.batch, waited, replica.max_wait_ms)
            if size == 0:
                heapq.heappush(events, (server.queue[0][0] + limit, 4, s))
                return
            process = server.idle.index(True)
            server.begin(size, now)
            end = now + int(replica.batch_latency_ms[size - 1] * 1e6 + 0.5)
            for _ in range(size):
                answered[server.queue.popleft()[1]] = end
            server.idle[process], server.free_at[process] = False, end
            heapq.heappush(events, (end, 1, first_process[s] + process))

    while events:
        now, kind, ident = heapq.heappop(events)
        if kind == 1:
            s = max(i for i in range(len(replicas)) if first_process[i] <= ident)
            servers[s].idle[ident - first_process[s]] = True
            start(s, now)
        elif kind == 2:
            s = rule.choose([server.load(now) for server in servers])
            servers[s].count, servers[s].counted_at = 1.0 + servers[s].count_arrivals(now), now
            servers[s].queue.append((now, ident))
            start(s, now)
        else:
            start(ident, now)
    return answered
