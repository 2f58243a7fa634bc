"""Compares a model's outputs under a share of a GPU with those on the whole GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuprof.profiling.child.job import Job
from gpuprof.profiling.child.runner import outputs_differ
from gpuprof.profiling.nsight.recorded_program import RecordedProgram

_KEPT = 8


class SharedOutputs:
    """Caches the outputs on the whole GPU of the last few jobs; they are the same for all shares of a model."""

    def __init__(self) -> None:
        self._alone: dict[tuple[str, str, int], dict[str, Any]] = {}

    def difference(self, job: Job, program: RecordedProgram, shared: Path) -> str | None:
        """Return a line on the difference of the outputs in ``shared`` from those without a share; None: equal.

        A model whose outputs differ between runs leaves no outputs and cannot be compared. Raises `UnavailableError`
        when the model does not run without a share.
        """
        if not shared.exists():
            return None
        # The share is not part of the key: outputs without a share serve the comparison with all shares.
        key = (str(job.path), job.graph.sha256, job.graph.batch)
        if key not in self._alone:
            path = program.outputs("alone")
            program.run({}, replace(program.task, outputs=path))
            if len(self._alone) >= _KEPT:
                del self._alone[next(iter(self._alone))]
            self._alone[key] = _read_outputs(path)
        alone = self._alone[key]
        return outputs_differ(alone, _read_outputs(shared)) if alone else None


def _read_outputs(path: Path) -> dict[str, Any]:
    import numpy as np

    return dict(np.load(path)) if path.exists() else {}
