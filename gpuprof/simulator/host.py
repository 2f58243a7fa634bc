"""CPU time that router, machine process and clients take from the batches on a machine that serves from its CPU.

They work for a request as it comes and as its answer goes. On a core that runs no batch they slow none down. Where
every core runs one, they mostly go on where they were last (`rules.host_work.STAYS`), which is the core that was idle
last, else on some core, each as likely as another. Whatever runs there ends so much later. What it comes to on average
is in `gpuprof.rules.host_work`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpuprof.rules.host_work import STAYS, HostWork, cores_of

if TYPE_CHECKING:
    from gpuprof.domain.deployment import Replica
    from gpuprof.simulator.state import ClusterArrays, Ints, State

_NS_PER_MS = 1e6
# A linear congruential generator (Park and Miller's multiplier) says which core it is: fixed, and the same compiled.
_MULTIPLIER, _MODULUS = 48271, 2**31 - 1
_STAYS = int(STAYS * _MODULUS)


def core_arrays(replicas: Sequence[Replica], host: HostWork) -> tuple[int, Ints, Ints]:
    """Return the nanoseconds that an event takes, and the processes of each core: where they start, and which.

    The replicas are those of the host's own CPU. The time is 0, and there are no cores, where nothing is disturbed: on
    other devices, or where there are none. Raises `InputError` when the replicas' shares are more than the machine.
    """
    nothing = 0, np.zeros(1, np.int64), np.zeros(0, np.int64)
    if not host.can_disturb or not replicas:
        return nothing
    slices = cores_of([(replica.sm_share_pct, replica.turns) for replica in replicas], host.host_cores)
    first = np.concatenate([[0], np.cumsum([replica.processes for replica in replicas])]).tolist()
    on = [
        [process for i, own in enumerate(slices) if core in own.cores for process in range(first[i], first[i + 1])]
        for core in range(host.host_cores)
    ]
    start = np.concatenate([[0], np.cumsum([len(own) for own in on])]).astype(np.int64)
    return round(host.event_ms * _NS_PER_MS), start, np.array([process for own in on for process in own], np.int64)


def run_host_work(cluster: ClusterArrays, state: State, requests: int) -> None:
    """Let the host do what comes up with this many requests, or their answers: on an idle core if there is one."""
    cores = len(cluster.core_start) - 1
    for turn in range(cores):
        core = (state.host[2] + turn) % cores
        runs = False
        for i in range(cluster.core_start[core], cluster.core_start[core + 1]):
            runs = runs or state.done_at[cluster.core_process[i]] >= 0
        if not runs:
            state.host[2] = core
            return
    state.host[1] = state.host[1] * _MULTIPLIER % _MODULUS
    core = state.host[2] if state.host[1] < _STAYS else state.host[1] % cores
    for i in range(cluster.core_start[core], cluster.core_start[core + 1]):
        process = cluster.core_process[i]
        if state.done_at[process] >= 0:
            state.done_at[process] += requests * cluster.host_event[0]
            turns = cluster.turns[cluster.process_replica[process]]
            if turns >= 0:
                state.turn_until[turns] = max(state.turn_until[turns], state.done_at[process])
