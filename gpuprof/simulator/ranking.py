"""A tournament tree that finds the replica that `gpuprof.rules.routing.FastestFirst` would choose.

Between two changes of a replica (a request joins it, a batch starts or ends) the time until it would answer, by
`rules.routing.finish_ms`, only falls as time passes, no faster than time itself, and never below what it is once
everything expected has happened: its *floor*. So each replica of a model is a leaf of a tree in one of two states:

* *falling*: the instant of its answer, as it was expected at the last change, bounds it from below;
* *settled*: it has come down to its floor and stays there; equal floors are counted, because equals take turns.

Each node of the tree holds the least of both below it, so that a change costs the height of the tree, and so does a
choice. The chosen value is always computed by the rule itself: the bounds only say which replicas need not be asked.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: The instant of an answer that will not come.
NEVER = 2**62
#: Longer times, of more than 30 years, are all bounded by this one.
LONGEST_MS = 1e12
#: With fewer replicas than this a model's are all asked: that is faster than the tree.
LEAST = 6
_NS = 1e6  # in a millisecond
#: What rounding may have moved a bound by: a few nanoseconds, and a part of the time itself.
_SLACK_NS, _SLACK = 8.0, 1e-11


class Ranking(NamedTuple):
    """The trees of all models in arrays; a model's nodes start at ``root[m]``, its root being node 1 of them.

    ``leaves`` (M,): leaves of a model's tree, a power of two; 0: it has none. ``position`` (R,): of a replica among
    those of its model. ``floor`` (R,) in ms. Of each node: ``falling`` the earliest instant in ns, ``settled`` the
    least floor in ms, ``ties`` how many have it.
    """

    root: Ints
    leaves: Ints
    position: Ints
    floor: Floats
    falling: Ints
    settled: Floats
    ties: Ints


def new_ranking(choice_start: Ints, choice: Ints) -> Ranking:
    """Return trees without a living replica, for models whose replicas are ``choice[choice_start[m]:…]``."""
    counts = np.diff(choice_start)
    leaves = np.array([1 << max(0, int(n - 1).bit_length()) if n >= LEAST else 0 for n in counts], np.int64)
    root = np.concatenate([[0], np.cumsum(2 * leaves)]).astype(np.int64)
    position = np.empty(len(choice), np.int64)
    for first, last in pairwise(choice_start.tolist()):
        position[choice[first:last]] = np.arange(last - first)
    nodes = max(1, int(root[-1]))
    return Ranking(
        root=root[:-1],
        leaves=leaves,
        position=position,
        floor=np.full(len(choice), np.inf),
        falling=np.full(nodes, NEVER),
        settled=np.full(nodes, np.inf),
        ties=np.zeros(nodes, np.int64),
    )


def rank(ranking: Ranking, model: int, replica: int, now: int, finish: float, floor: float) -> None:
    """Say that a replica would answer in ``finish`` ms from now (infinite: it is dead), in ``floor`` ms in the end."""
    ranking.floor[replica] = floor
    position = ranking.position[replica]
    if finish == np.inf:
        _set(ranking, model, position, NEVER, np.inf)
    elif finish == floor:
        _set(ranking, model, position, NEVER, floor)
    else:
        # Two nanoseconds early, so that rounding never puts the bound behind the answer.
        _set(ranking, model, position, now + int(min(finish, LONGEST_MS) * _NS) - 2, np.inf)


def _set(ranking: Ranking, model: int, position: int, falling: int, settled: float) -> None:
    """Change a leaf, and the nodes above it as far as they change."""
    base = ranking.root[model]
    node = ranking.leaves[model] + position
    ranking.falling[base + node], ranking.settled[base + node], ranking.ties[base + node] = falling, settled, 1
    node >>= 1
    while node > 0:
        left = base + 2 * node
        soonest = min(ranking.falling[left], ranking.falling[left + 1])
        one, other = ranking.settled[left], ranking.settled[left + 1]
        ties = (ranking.ties[left] if one <= other else 0) + (ranking.ties[left + 1] if other <= one else 0)
        least = min(one, other)
        here = base + node
        if ranking.falling[here] == soonest and ranking.settled[here] == least and ranking.ties[here] == ties:
            return
        ranking.falling[here], ranking.settled[here], ranking.ties[here] = soonest, least, ties
        node >>= 1


def slack_ns(finish: float) -> float:
    """Return by how many nanoseconds a bound on ``finish`` ms may be off."""
    return _SLACK_NS + _SLACK * _NS * finish


def do_all_settle_first(ranking: Ranking, model: int, now: int) -> bool:
    """Return whether no falling replica can be as good as the best settled one."""
    top = ranking.root[model] + 1
    least = ranking.settled[top]
    if ranking.falling[top] == NEVER:
        return True
    later: bool = ranking.falling[top] - now > least * _NS + slack_ns(least)
    return later


def find_soonest_falling(ranking: Ranking, model: int) -> int:
    """Return the position of the falling replica with the earliest instant."""
    base, leaves = ranking.root[model], ranking.leaves[model]
    wanted = ranking.falling[base + 1]
    node: int = 1
    while node < leaves:
        node = 2 * node + (ranking.falling[base + 2 * node] != wanted)
    position: int = node - leaves
    return position


def is_other_falling_within(ranking: Ranking, model: int, position: int, limit: float) -> bool:
    """Return whether a falling replica other than that at ``position`` is bounded by an instant up to ``limit``."""
    base = ranking.root[model]
    node = ranking.leaves[model] + position
    while node > 1:
        if ranking.falling[base + (node ^ 1)] <= limit:
            return True
        node >>= 1
    return False


def find_settled_tie(ranking: Ranking, model: int, turn: int) -> int:
    """Return the position of that of the replicas with the least floor whose turn it is."""
    base, leaves = ranking.root[model], ranking.leaves[model]
    least = ranking.settled[base + 1]
    remaining = turn % ranking.ties[base + 1]
    node = 1
    while node < leaves:
        node *= 2
        ties = ranking.ties[base + node] if ranking.settled[base + node] == least else 0
        if remaining >= ties:
            remaining -= ties
            node += 1
    position: int = node - leaves
    return position
