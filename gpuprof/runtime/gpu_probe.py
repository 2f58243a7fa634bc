"""Tries ONNX Runtime's provider for NVIDIA GPUs on this machine, and the options of its sessions.

``python -m gpuprof.runtime.gpu_probe`` runs a small network: a convolution, which needs cuBLAS and cuDNN, and a GELU,
one of ONNX Runtime's own kernels, which needs machine code for the GPU. It prints the result as a JSON object, then the
options that worked as another. This needs a child process: a process that has used CUDA holds memory on the GPU until
its end, has already read its share, and may be ended by an option that does not work.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpuprof.errors import shorten_message
from gpuprof.runtime.child_process import package_path
from gpuprof.runtime.gpu_session import GpuChoice, open_on_gpu
from gpuprof.runtime.module_command import ANSWER_S, module_command
from gpuprof.runtime.providers import GPU_OPTIONS, ORT_CUDA, missing_libraries
from gpuprof.runtime.session import has_cuda_build, open_session

_ERROR_LINE = re.compile(r"\[E:.*?\]\s*(?P<message>.*)")


@dataclass(frozen=True, slots=True)
class GpuProbe:
    """Result of the probe on this machine."""

    reason: str | None = None  #: Reason why the provider does not run; None: it runs.
    execution: str = "fused"  #: Options that work; see `gpuprof.runtime.gpu_session.GpuOptions.execution`.
    remarks: tuple[str, ...] = ()  #: Reasons against the other options.


@cache
def probe_gpu() -> GpuProbe:
    """Return the result of the probe on the first GPU here, cached.

    If the trial of options ended the probe's process, the workers started by this process try none.
    """
    try:
        process = subprocess.run(
            module_command("gpuprof.runtime.gpu_probe"),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            env={**os.environ, **package_path()},
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return GpuProbe(f"{ORT_CUDA} cannot be tried: {error}")
    probe = read_probe(process.stdout, process.stderr)
    if probe.reason is None and process.returncode:
        os.environ[GPU_OPTIONS] = GpuChoice.PLAIN
    return probe


def gpu_provider() -> str | None:
    """Return ONNX Runtime's provider for GPUs if it starts here, else None."""
    return ORT_CUDA if has_cuda_build() and probe_gpu().reason is None else None


def read_probe(output: str, complaints: str = "") -> GpuProbe:
    """Return the result of the program below from its stdout and stderr."""
    # Libraries may print lines of their own.
    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"probe": ')]
    last = shorten_message((complaints.strip().splitlines() or ["it says nothing"])[-1])
    if not results:
        return GpuProbe(f"{ORT_CUDA} ends the process that starts it: {last}")
    attempt, *trial = results
    if attempt["runs"]:
        if not trial:
            return GpuProbe(remarks=(f"the trial of options ended its process: {last}",))
        return GpuProbe(execution=trial[0]["execution"], remarks=tuple(trial[0]["remarks"]))
    error_line = _ERROR_LINE.search(complaints)
    missing = ", ".join(attempt["missing"])
    if missing:
        return GpuProbe(f"{ORT_CUDA} does not start: {missing} cannot be loaded")
    reason = attempt["error"] or (error_line["message"] if error_line else "it does not say why")
    return GpuProbe(f"{ORT_CUDA} does not start: {shorten_message(reason)}")


def main() -> int:
    """Run a small network on the GPU, plainly and with the options of sessions, and print the results."""
    import numpy as np

    random = np.random.default_rng(0)
    images, weights = (random.standard_normal(shape).astype(np.float32) for shape in ((4, 8, 8, 8), (8, 8, 3, 3)))
    feeds = {"x": images}
    attempt: dict[str, Any] = {"probe": "provider", "runs": False, "missing": (), "error": None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.onnx")
        _write_network(path, images.shape, weights)
        try:
            session = open_session(path, threads=1, provider=ORT_CUDA)
            session.run(None, feeds)  # the first convolution loads cuDNN, not the session
            attempt["runs"] = True
        except Exception as error:  # any CUDA error is the result of the probe
            attempt |= {"error": str(error), "missing": missing_libraries()}
        _print(attempt)
        if attempt["runs"]:
            trial = open_on_gpu(path, feeds, len(images), threads=1)
            _print({"probe": "options", "execution": trial.options.execution, "remarks": trial.remarks})
    return 0


def _write_network(path: Path, image_shape: tuple[int, ...], weights: Any) -> None:
    from onnx import TensorProto, helper, numpy_helper, save_model

    shape: list[str | int | None] = ["batch", *image_shape[1:]]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], auto_pad="SAME_UPPER"),
        helper.make_node("Gelu", ["c"], ["y"], domain="com.microsoft"),
    ]
    initializers = [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(weights[:, 0, 0, 0], "b")]
    graph = helper.make_graph(nodes, "probe", tensors[:1], tensors[1:], initializers)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    save_model(helper.make_model(graph, opset_imports=imports, ir_version=9), str(path))


def _print(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
