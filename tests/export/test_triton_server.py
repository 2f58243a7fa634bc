"""Triton's own server reads what ``gpuprof export --to triton`` writes.

``.ci/install-triton.sh`` unpacks it and ``GPUPROF_TRITON`` names the file; without it these tests are skipped. The
package has no backend for ONNX: that it asks for one says that names, versions and configuration were taken.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpuprof.export.targets import export
from gpuprof.pipeline.export import MapExportResult
from tests.export.test_triton_repository import _save_identity, _with_file

_UNPACKED = Path(__file__).parents[2] / ".venv/triton/pytriton/tritonserver/bin/tritonserver"
SERVER = Path(os.environ.get("GPUPROF_TRITON") or _UNPACKED)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SERVER.is_file(), reason="no tritonserver: GPUPROF_TRITON names none"),
]
_TAKEN = "unable to find backend library for backend 'onnxruntime'"


def _ask_triton(repository: Path) -> str:
    """Return what the server says of a repository; it ends, since no model can be loaded."""
    quiet = ["--allow-http=false", "--allow-grpc=false", "--allow-metrics=false", "--exit-on-error=true"]
    command = [str(SERVER), f"--model-repository={repository}", "--backend-directory=/nonexistent", *quiet]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    _save_identity(tmp_path / "net.onnx", "batch", 3)
    bundle = export(_with_file("net@3", "net.onnx", 4), "triton", base=tmp_path)
    MapExportResult(files=bundle.files, models=bundle.models).write(tmp_path / "out")
    (path,) = (tmp_path / "out").iterdir()
    return path


def test_its_server_takes_the_repository_with_the_version_of_the_map(repository: Path) -> None:
    log = _ask_triton(repository)
    assert f"failed to load 'net' version 3: Invalid argument: {_TAKEN}" in log
    assert "Poll failed" not in log


def test_its_server_refuses_a_configuration_that_is_wrong(repository: Path) -> None:
    (path,) = repository.rglob("config.pbtxt")
    path.write_text(path.read_text() + "nonsense: 1\n")
    log = _ask_triton(repository)
    assert "Poll failed" in log and _TAKEN not in log
