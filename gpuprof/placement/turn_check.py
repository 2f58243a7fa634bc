"""Checks replicas of a map that take turns: their groups, their shares, and the length of their cycles."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpuprof.domain.deployment import Partition, Replica
from gpuprof.placement.evidence import Violation

_RELATIVE = 1e-3
_ABSOLUTE = 1e-6


def check_turns(where: str, partition: Partition) -> Iterator[Violation]:
    """Yield replicas that cannot take turns, and times that are no longest waits for them."""
    groups: defaultdict[int, list[Replica]] = defaultdict(list)
    for replica in partition.replicas:
        groups[replica.turns].append(replica)
    for replica in groups.pop(0, []):
        if replica.turn_ms is not None:
            yield Violation("share", where, f"{replica.model} takes no turns, but has a turn_ms")
    for number, replicas in groups.items():
        yield from _check_group(where, f"turns {number}", replicas, unshared=partition.unshared)


def _check_group(where: str, name: str, replicas: Sequence[Replica], *, unshared: bool) -> Iterator[Violation]:
    models = " and ".join(dict.fromkeys(replica.model for replica in replicas))
    if unshared:
        yield Violation("share", where, f"{models} take {name} where nobody has a share")
    if len({replica.sm_share_pct for replica in replicas}) > 1:
        shares = ", ".join(f"{replica.sm_share_pct:g}%" for replica in replicas)
        yield Violation("share", where, f"{models} take {name} in shares of {shares}: it must be one")
    for replica in replicas:
        if replica.processes > 1 or replica.merged:
            what = "several models" if replica.merged else f"{replica.processes} processes"
            yield Violation("share", where, f"{replica.model} takes {name} with {what}: it must be one process of one")
    turns_ms = [replica.turn_ms for replica in replicas if replica.turn_ms]
    if len(turns_ms) < len(replicas):
        yield Violation("figures", where, f"{models} take {name}, but one of them has no turn_ms")
        return
    cycle_ms = math.fsum(turns_ms)
    for replica in replicas:
        said_ms = replica.predicted.latency_ms
        if abs(said_ms - cycle_ms) > _RELATIVE * cycle_ms + _ABSOLUTE:
            said = f"{replica.model} waits and runs for {said_ms:.4g} ms at most, but {name} take {cycle_ms:.4g} ms"
            yield Violation("figures", where, said)
        least_ms = (replica.batch_latency_ms or (cycle_ms,))[0]
        if least_ms < replica.wait_for_turn_ms * (1.0 - _RELATIVE):
            waits = f"its turn comes after {replica.wait_for_turn_ms:.4g} ms"
            yield Violation("figures", where, f"{replica.model} answers one request in {least_ms:.4g} ms, but {waits}")
