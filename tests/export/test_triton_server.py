"""Triton's own server reads what ``gpuprof export --to triton`` writes.

``.ci/install-triton.sh`` unpacks it and ``GPUPROF_TRITON`` names the file; without it these tests are skipped. The
package has no backend for ONNX: that it asks for one says that names, versions and configuration were taken. Planned
configurations are loaded and executed by a backend in Python (`triton_onnxruntime.py`).
"""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tritonclient import http
from tritonclient.utils import InferenceServerException

from gpuprof.cli.main import main
from gpuprof.domain.deployment import read_map
from gpuprof.export.targets import export
from gpuprof.pipeline.export import MapExportResult
from tests.export.test_triton_repository import _save_identity, _with_file
from tests.profiling.models import write_mlp

_UNPACKED = Path(__file__).parents[2] / ".venv/triton/pytriton/tritonserver/bin/tritonserver"
SERVER = Path(os.environ.get("GPUPROF_TRITON") or _UNPACKED)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SERVER.is_file(), reason="no tritonserver: GPUPROF_TRITON names none"),
]
#: Inputs and outputs of the models.
_TENSORS = (("input", "x"), ("output", "r1"))
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
    (path,) = (tmp_path / "out").glob("node*")
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


@contextmanager
def _serve(repository: Path, options: Path, backends: Path) -> Iterator[tuple[http.InferenceServerClient, int]]:
    """Start the server with a backend in Python for ONNX Runtime; yield a client and the process id."""
    home = SERVER.parents[1]
    shutil.copytree(home / "backends" / "python", backends / "python")
    stub = home / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}"
    shutil.copy(stub / "triton_python_backend_stub", backends / "python")
    (backends / "python" / "triton_python_backend_stub").chmod(0o755)
    (backends / "onnxruntime").mkdir()
    folders = [sysconfig.get_paths()["purelib"], str(Path(__file__).parent)]  # its interpreter finds no packages
    program = f"import sys\nsys.path[:0] = {folders}\nfrom triton_onnxruntime import TritonPythonModel\n"
    (backends / "onnxruntime" / "model.py").write_text(program)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(SERVER), f"--model-repository={repository}", f"--backend-directory={backends}"]
    command += [*options.read_text().split(), "--allow-grpc=false", "--allow-metrics=false"]
    command += ["--http-address=127.0.0.1", f"--http-port={port}"]
    libraries = {"LD_LIBRARY_PATH": str(home.parents[1] / "nvidia_pytriton.libs")}
    with (backends / "log").open("w") as log:
        server = subprocess.Popen(command, env={**os.environ, **libraries}, stdout=log, stderr=log)
    try:
        client = http.InferenceServerClient(f"127.0.0.1:{port}")
        _await_ready(client, server, backends / "log")
        yield client, server.pid
        client.close()
    finally:
        server.terminate()
        server.wait(60)


def _await_ready(client: http.InferenceServerClient, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()
        try:
            if client.is_server_ready():
                return
        except (OSError, InferenceServerException):
            pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def _list_cores(pid: int) -> dict[str, str]:
    """Return the allowed cores of a server's instances, which are processes of the backend in Python, by model."""
    cores = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            instance = next(part for part in Path(f"/proc/{child}/cmdline").read_text().split("\0") if "_0_0" in part)
            status = Path(f"/proc/{child}/status").read_text()
            cores[instance.removesuffix("_0_0")] = status.partition("Cpus_allowed_list:")[2].split()[0]
    return cores


def _infer(client: http.InferenceServerClient, name: str, width: int) -> bool:
    tensor = http.InferInput("x", [1, width], "FP32")
    tensor.set_data_from_numpy(np.ones((1, width), np.float32))
    return bool(client.infer(name, [tensor]).as_numpy("r1").any())


def test_its_server_loads_the_planned_configurations_of_five_models_and_executes_them(here: Path) -> None:
    widths = {f"net{number}": 16 + number for number in range(5)}
    tensors = {
        name: " ".join(f'{kind} {{ name: "{tensor}" data_type: TYPE_FP32 dims: {width} }}' for kind, tensor in _TENSORS)
        for name, width in widths.items()
    }
    for name, width in widths.items():
        Path("repository", name, "1").mkdir(parents=True)
        write_mlp(Path("repository", name, "1", "model.onnx"), width)
        text = f'backend: "onnxruntime" max_batch_size: 64 {tensors[name]} instance_group {{ kind: KIND_CPU }}'
        Path("repository", name, "config.pbtxt").write_text(text)
    files = [f"{name}=repository/{name}/1/model.onnx" for name in widths]
    assert main(["profile", *files, "--batch", "1,4", "--device", "cpu", "--time-limit", "0.1"]) in (0, 2)
    Path("slo.csv").write_text("model,rate_rps,slo_ms\n" + "".join(f"{name},20,500\n" for name in widths))
    assert main(["place", "--triton-repository", "repository", "--time-limit", "120"]) == 0
    with _serve(Path("repository"), Path("repository/node0.options"), here / "backends") as (client, pid):
        cores = _list_cores(pid)
        for name, width in widths.items():
            (group,) = client.get_model_config(name)["instance_group"]
            planned = [replica for *_, replica in read_map(Path("map.json")).places() if replica.model == name]
            assert group["count"] == sum(replica.processes for replica in planned)
            first, last = group["host_policy"].split("-")[1:]
            assert cores[name] in (first, f"{first}-{last}") and (cores[name] == first) is (first == last)
            assert _infer(client, name, width)
    assert main(["export", "--to", "triton", "-o", "workers"]) == 0
    folders = (path.parent for path in Path("workers").glob("*/server.options"))
    folder = max(folders, key=lambda folder: len(list(folder.glob("*/config.pbtxt"))))
    for path in folder.glob("*/config.pbtxt"):  # the compiled backend adds the tensors by itself
        path.write_text(path.read_text() + tensors[path.parent.name])
    with _serve(folder, folder / "server.options", here / "worker-backends") as (client, _):
        models = [path.parent.name for path in folder.glob("*/config.pbtxt")]
        assert all(_infer(client, name, widths[name]) for name in models)
