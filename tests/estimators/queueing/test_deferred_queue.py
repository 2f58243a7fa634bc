"""The queueing model that is imported at its first question."""

from __future__ import annotations

import subprocess
import sys

from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing.deferred_queue import DeferredQueue
from gpuprof.estimators.queueing.queueing import BatchQueue


def test_it_answers_what_the_default_model_answers() -> None:
    deferred, default = DeferredQueue(), BatchQueue()
    server, arrivals = BatchServer((2.0, 3.0), 2, 0.0), Arrivals(300.0)
    assert deferred.sojourn(arrivals, server) == default.sojourn(arrivals, server)
    assert deferred.pool(arrivals, (server,)) == default.pool(arrivals, (server,))


def test_planning_without_queues_does_not_import_scipy() -> None:
    code = """
import sys
import gpuprof.placement.optimal.optimal
from gpuprof.estimators.igniter.fit import fit_published_workload
from gpuprof.pipeline.problem import make_queueing
make_queueing(None, ())
print("scipy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
