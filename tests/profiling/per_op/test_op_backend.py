from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import UnavailableError
from gpuprof.kernel_db.schema import PER_OP
from gpuprof.kernel_db.store import KernelDb
from gpuprof.profiling.cpu.ort import OrtCollector
from gpuprof.profiling.per_op import op_backend
from gpuprof.profiling.per_op.op_backend import GpuOpBackend
from gpuprof.profiling.per_op.op_model import distinct_ops
from gpuprof.profiling.per_op.per_op import OpProfiler
from gpuprof.profiling.sweep.planning import NamedModel
from gpuprof.runtime.providers import ORT_CPU
from tests.profiling.kineto_files import trace_of_kernels, write
from tests.profiling.models import write_mlp
from tests.reruns import measures_in_real_time

GPU = device("a100-80")


def _stand(tmp_path: Path, document: Mapping[str, Any]) -> op_backend.Observation:
    source = next(iter(distinct_ops(write_mlp(tmp_path / "m.onnx"), 2, "m").values()))
    path = write(tmp_path / "trace.json", document)
    worker: Any = SimpleNamespace(call=lambda *_: path)
    measured = GpuOpBackend(GPU, Share(50.0)).measure(worker, source, tmp_path / "op.onnx", {})
    assert not path.exists()
    return measured


def test_all_kernels_of_a_lone_op_are_its_own_and_warm_up_is_left_out(tmp_path: Path) -> None:
    measured = _stand(tmp_path, trace_of_kernels(["im2col", "product"]))
    assert measured.times_ns == (80_250,) * 7
    assert [kernel.name for kernel in measured.kernels] == ["kernel_im2col", "kernel_product"]
    assert {kernel.op_type for kernel in measured.kernels} == {"MatMul"}
    assert {(kernel.model, kernel.sm_share_pct, kernel.batch) for kernel in measured.kernels} == {(PER_OP, 50.0, 2)}
    assert [kernel.grid_x for kernel in measured.kernels] == [216, 216]
    assert all(kernel.op_name is not None and kernel.op_name.startswith("m:") for kernel in measured.kernels)


def test_an_op_that_launches_nothing_has_no_time_and_says_so(tmp_path: Path) -> None:
    measured = _stand(tmp_path, {**trace_of_kernels([]), "traceEvents": []})
    assert measured.times_ns == ()
    assert measured.note is not None and measured.note.startswith("no kernel")


def test_a_gpu_without_pytorch_cannot_time_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="torch is not installed"):
        op_backend.op_backend(GPU, Share())


@pytest.mark.slow
@measures_in_real_time
def test_ops_run_one_after_another_under_torchs_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real child, model by model, with ONNX Runtime on the CPU: no kernels, and a whole trace for each op."""
    pytest.importorskip("torch")
    monkeypatch.setattr(GpuOpBackend, "provider", ORT_CPU)

    @contextmanager
    def unbound(*_: object) -> Iterator[tuple[dict[str, str], ...]]:
        yield ({},)

    monkeypatch.setattr(op_backend, "bind_shares", unbound)
    plan = OpProfiler(KernelDb.create(tmp_path / "db"), GPU, OrtCollector(), Share())
    missing, _ = plan.pending([NamedModel("m", write_mlp(tmp_path / "m.onnx"))], [2])
    rows = [outcome.row for outcome in plan.run(missing)]
    assert len(rows) == len(missing) == 3
    assert all((row.note or "").startswith("no kernel") for row in rows)
    assert all(row.duration_p50_ns is None for row in rows)
    assert KernelDb(tmp_path / "db").read_table("runs").to_pylist()[0]["provider"] == ORT_CPU
