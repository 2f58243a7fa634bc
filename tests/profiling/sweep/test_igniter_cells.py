from __future__ import annotations

from pathlib import Path

from gpuprof.profiling.sweep.igniter_cells import igniter_cells
from gpuprof.profiling.sweep.planning import NamedModel
from tests.profiling.models import write_mlp


def test_eleven_configurations_are_measured_alone_and_five_copies_fit(tmp_path: Path) -> None:
    cells = igniter_cells(NamedModel("mlp", write_mlp(tmp_path / "mlp.onnx")))
    alone = [cell for cell in cells if not cell.beside]
    assert len({(cell.job.graph.batch, cell.job.share) for cell in alone}) == len(alone) == 11
    copies = [cell for cell in cells if cell.beside]
    assert [len(cell.beside) for cell in copies] == [1, 2, 3, 4]
    for cell in copies:
        jobs = (cell.job, *cell.beside)
        assert len({job.workload for job in jobs}) == 1
        assert sum(job.share.sm_pct for job in jobs) <= 100.0
        assert cell.job.workload in [neighbour.job.workload for neighbour in alone]
