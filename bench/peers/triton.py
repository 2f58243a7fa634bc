"""NVIDIA's Triton server, as the wheel of PyTriton brings it: its Python backend around ONNX Runtime."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench.peers.environment import PeerMissingError
from bench.peers.ports import Ports

_ROOT = Path(__file__).resolve().parents[2]


def triton_command(python: Path, model: str, workers: int, ports: Ports, directory: Path) -> list[str]:
    """Write a model repository and a Python backend into ``directory``; return what starts the server on them.

    Raises
    ------
    PeerMissingError
        When the wheel has no backend for this version of Python.
    """
    packages = _packages(python)
    home = packages / "pytriton" / "tritonserver"
    repository, backends = directory / "models", directory / "backends"
    _write_backend(packages, home, backends / "python", python)
    folder = repository / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("from bench.peers.triton_model import TritonPythonModel\n")
    (folder / "config.pbtxt").write_text(describe_model(model, workers))
    program = home / "bin" / "tritonserver"
    program.chmod(0o755)
    options = {
        "model-repository": repository, "backend-directory": backends, "http-address": "127.0.0.1",
        "grpc-address": "127.0.0.1", "http-port": ports.http, "grpc-port": ports.grpc, "allow-metrics": "false",
    }  # fmt: skip
    libraries = packages / "nvidia_pytriton.libs"
    return [
        "env",
        f"LD_LIBRARY_PATH={libraries}",
        str(program),
        *(f"--{key}={value}" for key, value in options.items()),
    ]


def describe_model(model: str, workers: int) -> str:
    """Return the ``config.pbtxt`` of an ONNX file with one input, or of the identity ``null:SIZE``."""
    tensors = {"input": ("INPUT0", [1, -1]), "output": ("OUTPUT0", [1, -1])}
    if not model.startswith("null:"):
        import onnx

        graph = onnx.load(model, load_external_data=False).graph
        for kind, entry in (("input", graph.input[0]), ("output", graph.output[0])):
            tensors[kind] = (entry.name, [dim.dim_value or -1 for dim in entry.type.tensor_type.shape.dim])
    lines = [f'{kind} [{{name: "{name}" data_type: TYPE_FP32 dims: {dims}}}]' for kind, (name, dims) in tensors.items()]
    lines += ['backend: "python"', "max_batch_size: 0", f"instance_group [{{kind: KIND_CPU count: {workers}}}]"]
    return "\n".join([*lines, f'parameters {{key: "path" value {{string_value: "{model}"}}}}', ""])


def _packages(python: Path) -> Path:
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    return Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


def _write_backend(packages: Path, home: Path, folder: Path, python: Path) -> None:
    """Make the backend's folder: its own files, the program that runs Python, and the packages.

    That program has an interpreter of its own, which looks for packages nowhere else.
    """
    version = packages.parent.name.removeprefix("python")
    program = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not program.is_file():
        raise PeerMissingError(f"its wheel has no Python backend for Python {version} of {python}")
    shutil.copytree(home / "backends" / "python", folder)  # the server refuses links that leave the folder
    for file in (*packages.iterdir(), _ROOT / "bench"):
        (folder / file.name).symlink_to(file)
    shutil.copy(program, folder)
    (folder / program.name).chmod(0o755)
