"""Image branches that fork and join again: residual sums and gates.

ONNX Runtime fuses such a sum into a convolution, in the layout of convolutions, if equal shapes of all branches can be
inferred, as is the case if the fork has that layout. A copy between fork and sum has another layout. The sum and all
later ops then fall back, which costs more time than reading weights once can save. ONNX Runtime cannot execute this
fallback with the empty batch of an absent model.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprof.merging.plan import MergePlan
from gpuprof.merging.step_gain import CONVOLUTIONS, source_node

_JOINS = frozenset({"Add", "Sum", "Mul"})
_IMAGE_RANK = 4


def image_branches(plan: MergePlan) -> Iterator[tuple[int, set[int]]]:
    """Yield each step that joins image branches, with the steps in its branches and at their forks.

    Either all of these steps run once, or all run apart.
    """
    producers = {
        (m, name): i
        for i, step in enumerate(plan.steps)
        for m in step.models
        for name in source_node(plan, step, m).output
        if name
    }
    before: list[int] = []  # bit mask of each step's dependencies, the step itself included
    convolving = 0
    for i, step in enumerate(plan.steps):
        reached = 1 << i
        for key in _inputs(plan, i):
            if key in producers:
                reached |= before[producers[key]]
        before.append(reached)
        convolving |= (source_node(plan, step, step.models[0]).op_type in CONVOLUTIONS) << i
        joined = _joined_steps(plan, i, producers)
        if len(joined) > 1:
            union = intersection = before[joined[0]]
            for other in joined[1:]:
                union, intersection = union | before[other], intersection & before[other]
            branches = {k for k in range(i) if (union & ~intersection) >> k & 1}
            if union & ~intersection & convolving:
                inputs = [key for k in (*branches, i) for key in _inputs(plan, k)]
                yield (
                    i,
                    branches
                    | {producers[key] for key in inputs if key in producers and intersection >> producers[key] & 1},
                )


def _inputs(plan: MergePlan, index: int) -> list[tuple[int, str]]:
    step = plan.steps[index]
    return [(m, name) for m in step.models for name in source_node(plan, step, m).input]


def _joined_steps(plan: MergePlan, index: int, producers: dict[tuple[int, str], int]) -> list[int]:
    """Return the producers of the images joined by a step; empty if the step is no join."""
    step = plan.steps[index]
    first = step.models[0]
    node, values = source_node(plan, step, first), plan.sources[first].values
    if node.op_type not in _JOINS or node.domain:
        return []
    return [producers[first, n] for n in node.input if (first, n) in producers and len(values[n].dims) >= _IMAGE_RANK]
