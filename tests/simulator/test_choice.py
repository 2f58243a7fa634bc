"""The compiled choice of a replica is that of the router's routing rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gpuprof.domain.deployment import Replica
from gpuprof.rules.routing import FastestFirst, ReplicaLoad, expected_finish_ms
from gpuprof.simulator.cluster import SimulationOptions, build_cluster, places_of
from gpuprof.simulator.kernel import choose_replica, set_alive
from gpuprof.simulator.state import ClusterArrays, State, new_state
from tests.simulator.maps import make_map, replica

MS = 1_000_000


class Play:
    """A model whose replicas are changed at random, in the simulator's arrays and as the router would see them."""

    def __init__(self, replicas: Sequence[Replica], random: np.random.Generator) -> None:
        self.replicas, self.random = replicas, random
        deployment = make_map([[replica] for replica in replicas])
        self.cluster: ClusterArrays = build_cluster(deployment, places_of(deployment), SimulationOptions(1.0))
        self.state: State = new_state(self.cluster, 64, 64, 64)
        self.now = 10 * MS
        self.alive = [True] * len(replicas)
        self.rule = FastestFirst()
        for i in range(len(replicas)):
            set_alive(self.cluster, self.state, i, 1)

    def change(self, i: int) -> None:
        """Let something happen to a replica; round times, so that equals come up."""
        state, random, replica = self.state, self.random, self.replicas[i]
        first = int(self.cluster.first_process[i])
        kind = random.integers(0, 12)
        if kind == 0:
            self.alive[i] = not self.alive[i] or sum(self.alive) == 1
            set_alive(self.cluster, state, i, int(self.alive[i]))
        elif kind < 6:
            state.waiting[i] = random.integers(0, 3 * replica.batch + 1)
            state.queue_head[i] = i
            state.joined[i] = self.now - int(random.integers(0, 4)) * MS // 2
        elif kind < 8:
            state.free_processes[i] = random.integers(0, replica.processes + 1)
            state.joining[i] = random.integers(0, replica.batch + 1)
        else:
            process = first + int(random.integers(0, replica.processes))
            state.expected_at[process] = self.now + int(random.integers(-2, 9)) * MS // 2 + int(random.integers(0, 2))

    def loads(self) -> list[ReplicaLoad]:
        return [self.load(i) for i, alive in enumerate(self.alive) if alive]

    def load(self, i: int) -> ReplicaLoad:
        replica, first = self.replicas[i], int(self.cluster.first_process[i])
        waiting = int(self.state.waiting[i])
        waited = (self.now - int(self.state.joined[i])) * 1e-6 if waiting else 0.0
        ends = self.state.expected_at[first : first + replica.processes].tolist()
        assert replica.batch_latency_ms is not None
        busy = tuple(max(0, end - self.now) * 1e-6 for end in ends)
        idle = int(self.state.free_processes[i])
        joining = 0 if idle else int(self.state.joining[i])
        return ReplicaLoad(waiting, waited, busy, replica.batch_latency_ms, replica.max_wait_ms, idle, joining)

    def compare(self) -> None:
        loads = self.loads()
        living = [i for i, alive in enumerate(self.alive) if alive]
        index, finish = choose_replica(self.cluster, self.state, 0, self.now)
        assert index == living[self.rule.choose(loads)]
        assert finish == expected_finish_ms(self.load(index))


KINDS = {
    "one by one": [replica("m", [4.0])],
    "batches": [replica("m", [4.0, 5.0, 5.5, 7.0], max_wait_ms=2.0)],
    "several processes": [replica("m", [4.0, 5.0], processes=3, max_wait_ms=1.0)],
    "mixed": [
        replica("m", [4.0], processes=2),
        replica("m", [3.0, 3.5, 4.0], max_wait_ms=1.5),
        replica("m", [4.0, 4.0]),
    ],
}


@pytest.mark.parametrize("kinds", list(KINDS))
@pytest.mark.parametrize("count", [2, 6, 13])
def test_the_choice_is_that_of_the_rule(kinds: str, count: int) -> None:
    replicas = [KINDS[kinds][i % len(KINDS[kinds])] for i in range(count)]
    play = Play(replicas, np.random.default_rng(count))
    for _ in range(600):
        play.change(int(play.random.integers(0, count)))
        if play.random.random() < 0.5:
            play.now += int(play.random.choice([1, 999, MS // 2, 3 * MS]))
        play.compare()


def test_equals_take_turns_among_those_that_are_idle() -> None:
    play = Play([replica("m", [4.0])] * (9), np.random.default_rng(0))
    play.state.waiting[1] = 2
    play.state.queue_head[1] = 0
    chosen = [choose_replica(play.cluster, play.state, 0, play.now)[0] for _ in range(16)]
    assert sorted(set(chosen)) == [0, 2, 3, 4, 5, 6, 7, 8]
    assert all(chosen.count(i) == 2 for i in set(chosen))


def test_times_of_centuries_are_compared_too() -> None:
    play = Play([replica("m", [1e13 + i]) for i in range(6)], np.random.default_rng(0))
    play.state.expected_at[:] = play.now + 5 * MS
    play.compare()


def test_nobody_is_chosen_where_nobody_lives() -> None:
    play = Play([replica("m", [4.0])] * 6, np.random.default_rng(0))
    for i in range(6):
        set_alive(play.cluster, play.state, i, 0)
    assert choose_replica(play.cluster, play.state, 0, play.now)[0] == -1
