"""CPU time that router, machine process and clients take from the batches on a machine that serves from its CPU.

This host work occurs when a request arrives and when its answer leaves. On a core without a batch it slows no batch. If
every core runs a batch, the work mostly stays on the core that was idle last (`rules.host_work.STAYS`), else moves to a
uniformly random core, and delays the batches there by its duration. `gpuprof.rules.host_work` has the average effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpuprof.rules.host_work import STAYS, HostWork, cores_of

if TYPE_CHECKING:
    from gpuprof.domain.deployment import Replica
    from gpuprof.simulator.state import ClusterArrays, Ints, State

# Linear congruential generator (Park and Miller's multiplier) of cores, reproducible and equal in compiled code.
_MULTIPLIER, _MODULUS = 48271, 2**31 - 1
_STAYS = int(STAYS * _MODULUS)


def core_arrays(replicas: Sequence[Replica], host: HostWork) -> tuple[int, Ints, Ints]:
    """Return the nanoseconds of host work per event, and each core's processes: start offsets and process numbers.

    ``replicas``: those on the host's own CPU. Without disturbance (other devices, or no replicas) the time is 0 and
    there are no cores. Raises `InputError` when the replicas' shares exceed the machine.
    """
    no_host = 0, np.zeros(1, np.int64), np.zeros(0, np.int64)
    if not host.can_disturb or not replicas:
        return no_host
    slices = cores_of([(replica.sm_share_pct, replica.turns) for replica in replicas], host.host_cores)
    first = np.concatenate([[0], np.cumsum([replica.processes for replica in replicas])]).tolist()
    on = [
        [process for i, part in enumerate(slices) if core in part.cores for process in range(first[i], first[i + 1])]
        for core in range(host.host_cores)
    ]
    start = np.concatenate([[0], np.cumsum([len(processes) for processes in on])]).astype(np.int64)
    return round(host.event_ms * 1e6), start, np.array([process for processes in on for process in processes], np.int64)


def run_host_work(cluster: ClusterArrays, state: State, requests: int) -> None:
    """Do the host work of this many requests or answers, on an idle core if any."""
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
