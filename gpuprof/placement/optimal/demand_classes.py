"""Classes of similar demands for searches and bounds."""

from __future__ import annotations

from collections import defaultdict

from gpuprof.domain.demand import Demand
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Maximum number of classes of a search, and minimum number of demands per class.
_MOST_CLASSES = 60
_FEWEST_ALIKE = 2

#: The demands of each class, by its first demand.
DemandClasses = dict[str, list[Demand]]


def group_alike(problem: Problem, segments: Segments) -> DemandClasses:
    """Return the demands of each class, by its first demand, in the order of the first demands."""
    classes: defaultdict[str, list[Demand]] = defaultdict(list)
    for demand in problem.demands:
        classes[segments.first_alike(demand.model)].append(demand)
    return dict(classes)


def number_classes(problem: Problem, segments: Segments) -> dict[str, int]:
    """Return the numbers of the classes, by the first demand of each."""
    return {model: number for number, model in enumerate(group_alike(problem, segments))}


def is_of_few_classes(problem: Problem, segments: Segments) -> bool:
    """Return whether there are many demands of few classes; False under queueing, whose estimates take too long."""
    if problem.options.latency_budget is None:
        return False
    count = len(group_alike(problem, segments))
    return count <= _MOST_CLASSES and len(problem.demands) >= _FEWEST_ALIKE * count
