"""The default queueing model imports SciPy at its first question."""

from __future__ import annotations

import subprocess
import sys


def test_planning_without_queues_does_not_import_scipy() -> None:
    code = """
import sys
import gpuprof.placement.optimal.optimal
from gpuprof.estimators.igniter.igniter import fit_published_workload
from gpuprof.pipeline.problem import make_queueing
make_queueing(None, ())
print("scipy" in sys.modules)
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["False"]
