"""ONNX Runtime's real build for GPUs on a machine without one: nothing may run on the CPU under a GPU's name.

The wheel shares its module's name with the CPU build, so that it stands in a folder of its own, which
``.ci/install-onnxruntime-gpu.sh`` makes and ``GPUPROF_ORT_GPU`` names; without it these tests are skipped.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprof.kernel_db.store import KernelDb
from gpuprof.runtime.providers import ORT_CUDA
from tests.profiling.models import write_mlp
from tests.reruns import waits_for_processes

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("GPUPROF_ORT_GPU") or ROOT / ".venv" / "onnxruntime-gpu")
PLAYED_NVML = ROOT / "bench" / "gpu" / "rehearsal" / "site" / "pynvml.py"

pytestmark = [
    waits_for_processes,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SITE / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so").exists(),
        reason=f"no onnxruntime-gpu in {SITE}: .ci/install-onnxruntime-gpu.sh puts it there",
    ),
]


def _python(*arguments: str, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(each) for each in (first, SITE, ROOT) if each is not None)
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_it_lists_the_provider_and_a_session_on_it_is_refused_naming_what_is_missing(tmp_path: Path) -> None:
    model = write_mlp(tmp_path / "m.onnx")
    program = f"""
from pathlib import Path
from gpuprof.errors import UnavailableError
from gpuprof.runtime.gpu_probe import gpu_provider
from gpuprof.runtime.session import has_cuda_build, open_session
assert has_cuda_build()
print(gpu_provider())
try:
    open_session(Path({str(model)!r}), threads=1, provider={ORT_CUDA!r})
except UnavailableError as error:
    print(error.message)
"""
    completed = _python("-c", program)
    provider, refusal = completed.stdout.strip().splitlines()
    assert provider == "None", completed.stderr
    assert "on the CPU because its CUDAExecutionProvider does not start" in refusal
    assert "cannot be loaded" in refusal or "driver" in refusal  # without CUDA's libraries, or with them and no GPU


def test_profiling_a_gpu_stores_no_figure_of_the_cpu(tmp_path: Path) -> None:
    played = tmp_path / "site"
    played.mkdir()
    (played / "pynvml.py").write_text(PLAYED_NVML.read_text())  # a GPU as NVML shows it
    model = write_mlp(tmp_path / "m.onnx")
    words = ["profile", str(model), "--device", "gpu", "--collector", "nvml", "--batch", "1", "--time-limit", "0.5"]
    completed = _python("-m", "gpuprof", *words, "--db", str(tmp_path / "db"), first=played)
    assert completed.returncode != 0
    assert "does not start" in completed.stderr + completed.stdout
    rows = KernelDb(tmp_path / "db").read_table("models").to_pylist() if (tmp_path / "db").is_dir() else []
    assert [row for row in rows if row["latency_mean_ms"] is not None] == []
