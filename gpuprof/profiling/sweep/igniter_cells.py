"""Measurements that iGniter's performance model needs (section 3.1): 11 configurations alone, and co-located copies."""

from __future__ import annotations

from gpuprof.domain.share import Share
from gpuprof.profiling.sweep.cell import Cell
from gpuprof.profiling.sweep.planning import NamedModel

#: Batch and share in percent. The paper uses eleven configurations without naming them: the first nine are those of its
#: published profiles; the other two add an intermediate batch, and the share at which five copies fit a GPU.
CONFIGURATIONS = (*((batch, share) for batch in (1, 16, 32) for share in (10.0, 50.0, 100.0)), (8, 50.0), (16, 20.0))
#: Concurrent copies of the last configuration: for the coefficients of power, scheduling and cache.
COPIES = range(2, 6)


def igniter_cells(model: NamedModel) -> tuple[Cell, ...]:
    """Return the eleven configurations alone, then two to five copies at once.

    Raises `InputError` when the model cannot be bound to a batch size.
    """
    alone = [Cell(model.job(batch, Share(share))) for batch, share in CONFIGURATIONS]
    job = alone[-1].job
    return (*alone, *(Cell(job, (job,) * (copies - 1)) for copies in COPIES))
