"""Image branches that fork and join again: residual sums and gates.

ONNX Runtime does such a sum within a convolution, in the layout of convolutions, where it can tell that all branches
have one shape, and it can where they part in that layout. A copy between there and the sum is in another layout: then
the sum and all that follow it fall back, which costs more than any weights read once can save, and which ONNX Runtime
cannot do with an empty batch, the one of an absent model.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprof.merging.plan import MergePlan
from gpuprof.merging.step_gain import CONVOLUTIONS, source_node

_JOINS = frozenset({"Add", "Sum", "Mul"})
_IMAGE_RANK = 4


def image_branches(plan: MergePlan) -> Iterator[tuple[int, set[int]]]:
    """Yield each step that joins branches of images, with the steps in its branches and those where these part.

    All of them run once, or all apart.
    """
    producers = {
        (m, name): i
        for i, step in enumerate(plan.steps)
        for m in step.models
        for name in source_node(plan, step, m).output
        if name
    }
    before: list[int] = []  # of each step the steps that it depends on, itself included, as the bits of a number
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
    """Return the steps that make the images which a step joins; none where it joins none."""
    step = plan.steps[index]
    first = step.models[0]
    node, values = source_node(plan, step, first), plan.sources[first].values
    if node.op_type not in _JOINS or node.domain:
        return []
    return [producers[first, n] for n in node.input if (first, n) in producers and len(values[n].dims) >= _IMAGE_RANK]
