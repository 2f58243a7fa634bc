"""MIG-serving's slow algorithms: a genetic algorithm whose crossover is a Monte Carlo tree search (Tan et al., 2021).

A deployment is a list of GPU configurations, each a legal layout with a service in each instance. Crossover takes
configurations away at random and lets the tree search serve what is then missing; mutation exchanges services between
instances of one profile on different GPUs, which changes what stands together and nothing else. The fast algorithm's
deployment is the first of the population; the best is always kept (arXiv 2109.11067, the two-phase optimizer).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from gpuprof.domain.mig import Layout
from gpuprof.placement.limit import Limit
from gpuprof.placement.published.mig_configuration import COMPLETE, MigConfiguration, Services, rank_configurations

#: Decided here, in place of the paper's hours: deployments that live on, the most configurations that crossover takes
#: away, edges of a node of the tree, how often the tree is descended, and the exploration weight of UCT.
_POPULATION, _MOST_ERASED, _EDGES, _DESCENTS, _EXPLORATION = 4, 6, 5, 24, 0.5

Deployment = tuple[MigConfiguration, ...]


@dataclass(slots=True)
class _Node:
    """A state of the search: what is served so far; edges are the configurations that add most to it."""

    served: Counter[str]
    edges: Sequence[MigConfiguration]
    children: dict[int, _Node] = field(default_factory=dict)
    visits: int = 0
    reward: float = 0.0


@dataclass(slots=True)
class SlowSearch:
    """Improves a deployment."""

    services: Services
    layouts: Sequence[Layout]
    most: int | None  #: GPUs that there are; None: as many as needed.
    rounds: int  #: Rounds without an improvement after which the search is over.
    seed: int
    limit: Limit
    _ranked: dict[tuple[tuple[str, int], ...], Sequence[MigConfiguration]] = field(default_factory=dict)

    def improve(self, fast: Deployment) -> Deployment:
        """Return a deployment that serves as much on fewer GPUs, or more on as many; ``fast`` where none is found."""
        random = Random(self.seed)
        population, rounds_left = [fast], self.rounds
        while rounds_left > 0 and not self.limit.is_over:
            before = self._fitness(population[0])
            young = [self._mutate(self._cross(one, random), random) for one in population for _ in range(2)]
            distinct = {one: self._fitness(one) for one in (*population, *young)}
            population = sorted(distinct, key=lambda one: distinct[one], reverse=True)[:_POPULATION]
            rounds_left = self.rounds if self._fitness(population[0]) > before else rounds_left - 1
        return population[0]

    def _fitness(self, deployment: Deployment) -> tuple[float, int, float]:
        """Return the requests/s that are served, up to what is asked for; fewer GPUs; what could be served beyond."""
        served = self._count_instances(deployment)
        asked = self.services.rates
        within = math.fsum(min(rate, self.services.rps(served, model)) for model, rate in asked.items())
        beyond = math.fsum(self.services.rps(served, model) / rate for model, rate in asked.items())
        return round(within, 6), -len(deployment), round(beyond, 9)

    def _count_instances(self, deployment: Sequence[MigConfiguration]) -> Counter[str]:
        """Return how many instances of each profile each service has, as ``model/profile``."""
        return Counter(key for one in deployment for key in one.keys)

    def _cross(self, deployment: Deployment, random: Random) -> Deployment:
        """Take some configurations away and let the tree search replace them; then remove superfluous ones."""
        if not deployment:
            return deployment
        erased = set(random.sample(range(len(deployment)), random.randint(1, min(_MOST_ERASED, len(deployment)))))
        kept = [one for number, one in enumerate(deployment) if number not in erased]
        return self._without_needless((*kept, *self._search(kept, len(erased), random)))

    def _without_needless(self, deployment: Deployment) -> Deployment:
        kept = list(deployment)
        enough = self._fitness(deployment)[0]
        for one in deployment:
            rest = list(kept)
            rest.remove(one)
            if self._fitness(tuple(rest))[0] >= enough:
                kept = rest
        return tuple(kept)

    def _mutate(self, deployment: Deployment, random: Random) -> Deployment:
        """Exchange the services of two instances of one profile."""
        if len(deployment) < 2:
            return deployment
        first, second = random.sample(range(len(deployment)), 2)
        pairs = [
            (i, j)
            for i, one in enumerate(deployment[first])
            for j, other in enumerate(deployment[second])
            if one.segment.share == other.segment.share and one.segment.model != other.segment.model
        ]
        if not pairs:
            return deployment
        changed = list(deployment)
        i, j = random.choice(pairs)
        changed[first], changed[second] = changed[first].exchange(i, changed[second], j)
        return tuple(changed)

    def _search(self, kept: Sequence[MigConfiguration], before: int, random: Random) -> Deployment:
        """Return the fewest configurations that the tree search finds for what ``kept`` leaves unserved."""
        root = self._node(self._count_instances(kept))
        room = math.inf if self.most is None else self.most - len(kept)
        best: tuple[tuple[float, int, float], Deployment] | None = None
        for _ in range(_DESCENTS):
            if best is not None and self.limit.is_over:
                break
            path, chosen = self._descend(root, random, room)
            chosen = (*chosen, *self._roll_out(path[-1].served, random, room - len(chosen)))
            rank = self._fitness((*kept, *chosen))
            if best is None or rank > best[0]:
                best = (rank, chosen)
            share = rank[0] / max(1e-9, math.fsum(self.services.rates.values()))
            for node in path:
                node.visits += 1
                node.reward += share * before / max(1, len(chosen))
        return () if best is None else best[1]

    def _descend(self, root: _Node, random: Random, room: float) -> tuple[list[_Node], Deployment]:
        """Follow the edges of largest upper bound to one that was not taken yet, and take it."""
        path, chosen = [root], list[MigConfiguration]()
        while path[-1].edges and len(chosen) < room:
            node = path[-1]
            untried = [number for number in range(len(node.edges)) if number not in node.children]
            edge = random.choice(untried) if untried else max(node.children, key=lambda n: _bound(node, n))
            chosen.append(node.edges[edge])
            if untried:
                node.children[edge] = self._node(node.served + Counter(chosen[-1].keys))
            path.append(node.children[edge])
            if untried:
                break
        return path, tuple(chosen)

    def _roll_out(self, served: Counter[str], random: Random, room: float) -> Deployment:
        """Serve the rest by configurations drawn from the best ones, in proportion to how much they add."""
        chosen: list[MigConfiguration] = []
        while len(chosen) < room:
            edges = self._edges(served)
            if not edges:
                break
            chosen.append(random.choices(edges, [one.score for one in edges])[0])
            served = served + Counter(chosen[-1].keys)
        return tuple(chosen)

    def _node(self, served: Counter[str]) -> _Node:
        return _Node(served, self._edges(served))

    def _edges(self, served: Counter[str]) -> Sequence[MigConfiguration]:
        key = tuple(sorted(served.items()))
        if key not in self._ranked:
            completion = {
                model: min(COMPLETE, self.services.rps(served, model) / rate)
                for model, rate in self.services.rates.items()
            }
            replicas = {model: self.services.count(served, model) for model in completion}
            self._ranked[key] = rank_configurations(self.services, self.layouts, completion, replicas)[:_EDGES]
        return self._ranked[key]


def _bound(node: _Node, edge: int) -> float:
    """UCT: the mean reward of an edge, and the more for the less often it was taken."""
    child = node.children[edge]
    return child.reward / child.visits + _EXPLORATION * math.sqrt(math.log(node.visits) / child.visits)
