from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpuprof.domain.share import Share
from gpuprof.kernel_db.schema import PER_OP
from gpuprof.kernel_db.store import KernelDb
from gpuprof.kernel_db.verification import verify
from gpuprof.profiling.cpu.ort import OrtCollector
from gpuprof.profiling.per_op import op_backend
from gpuprof.profiling.per_op.op_backend import CpuOpBackend, Observation
from gpuprof.profiling.per_op.per_op import OpOutcome, OpProfiler
from gpuprof.profiling.sweep.planning import NamedModel
from gpuprof.profiling.worker.process import Worker
from gpuprof.profiling.worker.tasks import Effort
from tests.profiling.models import write_convs, write_mlp
from tests.profiling.requests import CPU
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_backend, "EFFORT", Effort(time_s=0.01, min_repeats=4, max_repeats=20))


def _plan(path: Path, share: float = 100.0) -> OpProfiler:
    return OpProfiler(KernelDb.create(path / "db"), CPU, OrtCollector(), Share(share))


def _measure(plan: OpProfiler, models: list[NamedModel], batches: list[int]) -> tuple[list[OpOutcome], list[OpOutcome]]:
    missing, measured = plan.pending(models, batches)
    return list(plan.run(missing)), measured


def test_each_distinct_op_is_measured_once_across_models_and_runs(tmp_path: Path) -> None:
    first = NamedModel("first", write_mlp(tmp_path / "first.onnx", layers=2))
    twin = NamedModel("twin", write_mlp(tmp_path / "twin.onnx", layers=5))
    new, measured = _measure(_plan(tmp_path), [first], [1, 2])
    assert (len(new), len(measured)) == (6, 0)
    assert all(outcome.row.duration_p50_ns is not None for outcome in new)
    new, measured = _measure(_plan(tmp_path), [first, twin], [1, 2])
    assert (len(new), len(measured)) == (0, 6)
    new, measured = _measure(_plan(tmp_path), [twin], [4])
    assert (len(new), len(measured)) == (3, 0)
    database = KernelDb(tmp_path / "db")
    assert database.read_table("ops", where={"model": PER_OP}).num_rows == 9
    assert verify(database) == []


def test_another_share_is_another_measurement(tmp_path: Path) -> None:
    model = NamedModel("m", write_mlp(tmp_path / "m.onnx"))
    _measure(_plan(tmp_path), [model], [1])
    assert len(_plan(tmp_path, 50.0).pending([model], [1])[0]) == 3


def test_kernels_say_what_an_op_calls(tmp_path: Path) -> None:
    _measure(_plan(tmp_path), [NamedModel("convs", write_convs(tmp_path / "convs.onnx"))], [1])
    kernels = KernelDb(tmp_path / "db").read_table("kernels").to_pylist()
    called: dict[str, set[str]] = {row["op_type"]: set() for row in kernels}
    for row in kernels:
        called[row["op_type"]].add(row["name"])
    assert "CPU:Conv" in called["Conv"]
    assert called["Relu"] == {"CPU:Relu"}


def test_an_op_that_takes_the_process_with_it_is_remembered_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, ended = CpuOpBackend.measure, list[int]()

    def dying(self: CpuOpBackend, worker: Worker, *given: Any) -> Observation:
        if not ended:
            ended.append(worker.process_id)
            os.kill(worker.process_id, signal.SIGSEGV)
        return measure(self, worker, *given)

    monkeypatch.setattr(CpuOpBackend, "measure", dying)
    new, _ = _measure(_plan(tmp_path), [NamedModel("m", write_mlp(tmp_path / "m.onnx"))], [1])
    assert [outcome.row.duration_p50_ns is None for outcome in new] == [True, False, False]
    assert "SIGSEGV" in (new[0].row.note or "")
    monkeypatch.undo()
    assert _plan(tmp_path).pending([NamedModel("m", tmp_path / "m.onnx")], [1])[0] == []


KILLED = """
import sys
from pathlib import Path
from gpuprof.profiling.per_op import per_op
from gpuprof.profiling.sweep.planning import NamedModel
from tests.profiling.per_op.test_per_op import _plan
per_op._KEEP_EVERY_S = 0.0
path = Path(sys.argv[1])
plan = _plan(path)
for outcome in plan.run(plan.pending([NamedModel("m", path / "m.onnx")], [1, 2, 3, 4, 5, 6, 7, 8])[0]):
    print("one", flush=True)
"""


def test_a_killed_measurement_goes_on_where_it_was(tmp_path: Path) -> None:
    model = NamedModel("m", write_mlp(tmp_path / "m.onnx"))
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline() == "one\n"
        process.send_signal(signal.SIGKILL)
    time.sleep(0.1)
    missing, measured = _plan(tmp_path).pending([model], [1, 2, 3, 4, 5, 6, 7, 8])
    assert 4 <= len(measured) < 24
    assert len(missing) == 24 - len(measured)
