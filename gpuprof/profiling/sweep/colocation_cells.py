"""What interference models are fitted to: models beside one another, two to four at a time, each in an equal part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

from gpuprof.domain.share import Share
from gpuprof.profiling.child.job import Job
from gpuprof.profiling.sweep.campaign import Cell
from gpuprof.profiling.sweep.planning import NamedModel

#: Batches of both sides of a pair.
BATCHES = (1, 8)
#: How many run at once beyond pairs, in groups of neighbours of the given order.
CROWDS = (3, 4)


def colocation_cells(models: Sequence[NamedModel], batches: Sequence[int] = BATCHES) -> tuple[Cell, ...]:
    """Return each workload alone, every pair of models at each batch, and crowds of three and four at the first.

    Raises
    ------
    InputError
        When a model cannot be bound to one of the batch sizes.
    """
    together = [
        tuple(_job(model, batch, 2) for model in pair)
        for batch in batches
        for pair in combinations_with_replacement(models, 2)
    ]
    for crowd in CROWDS:
        ring = [*models, *models, *models, *models]
        together += [
            tuple(_job(model, batches[0], crowd) for model in ring[start : start + crowd])
            for start in range(len(models))
        ]
    alone = {(job.graph.name, job.graph.batch, job.share): job for jobs in together for job in jobs}
    return (*map(Cell, alone.values()), *(Cell(jobs[0], jobs[1:]) for jobs in together))


def _job(model: NamedModel, batch: int, parts: int) -> Job:
    return model.job(batch, Share(100.0 / parts))
