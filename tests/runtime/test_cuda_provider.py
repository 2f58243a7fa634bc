"""The provider for NVIDIA GPUs where it does not start, played; the real wheel is in test_real_gpu_wheel.py."""

import json
import os
import struct
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from gpuprof.domain.catalogue import device
from gpuprof.errors import UnavailableError
from gpuprof.profiling.gpu import collectors
from gpuprof.profiling.gpu.collectors import gpu_unavailable_reason
from gpuprof.runtime import gpu_probe, providers
from gpuprof.runtime.gpu_probe import GpuProbe, gpu_provider, probe_gpu, read_probe
from gpuprof.runtime.gpu_session import open_on_gpu
from gpuprof.runtime.providers import (
    CUDA_OPTIONS,
    GPU_OPTIONS,
    ORT_CPU,
    ORT_CUDA,
    describe_missing_code,
    has_code,
    load_cuda_libraries,
    read_code,
)
from gpuprof.runtime.session import open_session, session_settings
from tests.profiling.models import write_mlp
from tests.runtime.played_gpu import play_gpu


@pytest.fixture
def cpu_fallback(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """An ONNX Runtime that lists the provider for GPUs and opens every session on the CPU, as the real one does."""
    calls: list[Any] = []
    opened = ort.InferenceSession

    def fall_back(path: str, options: Any = None, providers: Any = ()) -> Any:
        calls.append(providers)
        return opened(path, options, providers=[ORT_CPU])

    monkeypatch.setattr(ort, "get_available_providers", lambda: [ORT_CUDA, ORT_CPU])
    monkeypatch.setattr(ort, "InferenceSession", fall_back)
    monkeypatch.setattr(ort, "preload_dlls", lambda: print("Failed to load libcublas.so.13: cannot open"))  # noqa: T201
    load_cuda_libraries.cache_clear()
    yield calls
    load_cuda_libraries.cache_clear()


def test_a_session_that_fell_back_to_the_cpu_is_an_error_that_names_the_library(
    cpu_fallback: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnavailableError, match=r"on the CPU because its CUDA.* libcublas\.so\.13 cannot be loaded"):
        open_session(write_mlp(tmp_path / "m.onnx"), threads=1, provider=ORT_CUDA)
    assert capsys.readouterr().out == ""  # what preloading prints would stand among our own lines


def test_the_options_that_are_recorded_are_those_that_are_set(cpu_fallback: list[Any], tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        open_session(write_mlp(tmp_path / "m.onnx"), threads=1, provider=ORT_CUDA)
    assert cpu_fallback == [[(ORT_CUDA, dict(CUDA_OPTIONS)), ORT_CPU]]
    assert CUDA_OPTIONS.items() <= session_settings(1, ORT_CUDA).items()
    assert not CUDA_OPTIONS.keys() & session_settings(1).keys()
    assert CUDA_OPTIONS["use_tf32"] == "1"


def test_a_provider_that_does_not_start_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_probe, collectors):
        monkeypatch.setattr(module, "has_cuda_build", lambda: True)
        monkeypatch.setattr(module, "probe_gpu", lambda: GpuProbe("it does not start"))
    assert gpu_provider() is None and gpu_unavailable_reason() == "it does not start"
    monkeypatch.setattr(gpu_probe, "probe_gpu", GpuProbe)
    assert gpu_provider() == ORT_CUDA


def test_boards_that_the_installed_wheel_has_no_code_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"onnxruntime-gpu": "1.31.0"}[name])
    message = describe_missing_code(device("v100"))
    assert message is not None and message.startswith(
        "onnxruntime-gpu 1.31.0, which is installed, has no code for v100"
    )
    assert describe_missing_code(device("t4")) is None

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert describe_missing_code(device("v100")) is None  # nothing that would serve on a GPU is installed


def test_code_of_an_installed_build_is_read_from_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def entry(kind: int, version: int) -> bytes:
        header = struct.pack("<HHIQ12xI", kind, 0x101, 64, 16, version)
        return header.ljust(64, b"\0") + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0)

    fat_binaries = [b"".join(entries) for entries in ([entry(2, 60), entry(2, 70)], [entry(2, 86), entry(1, 90)])]
    parts = [b"\x50\xed\x55\xba" + struct.pack("<HHQ", 1, 16, len(body)) + body for body in fat_binaries]
    library = tmp_path / "libonnxruntime_providers_cuda.so"
    library.write_bytes(b"ELF" * 9 + b"\0\0\0".join(parts) + b"end")
    assert read_code(library) == {(2, 60), (2, 70), (2, 86), (1, 90)}
    monkeypatch.setattr(providers, "_capi_directory", lambda: tmp_path)
    assert [name for name in ("3.7", "6.1", "7.0", "7.5", "8.0", "8.9", "9.0", "10.0") if has_code(name)] == [
        "6.1", "7.0", "7.5", "8.9", "9.0", "10.0",
    ]  # fmt: skip


def test_the_probe_runs_a_convolution_and_an_op_of_onnx_runtimes_own_and_tries_the_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a played GPU, without CUDA's runtime: no option that needs pinned memory works."""
    play_gpu(monkeypatch, lambda options: None)
    monkeypatch.setattr(
        gpu_probe, "open_session", lambda path, *, threads, provider: open_session(path, threads=threads)
    )
    monkeypatch.setattr(gpu_probe, "open_on_gpu", partial(open_on_gpu, device="cpu"))
    assert gpu_probe.main() == 0
    probe = read_probe(capsys.readouterr().out)
    assert probe.reason is None and probe.execution == "fused" and "libcudart" in probe.remarks[0]


def test_no_options_are_tried_where_their_trial_ended_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_OPTIONS, "auto")
    output = json.dumps({"probe": "provider", "runs": True, "missing": [], "error": None})
    crashed = SimpleNamespace(stdout=output, stderr="CUDA error: an illegal memory access\n", returncode=-6)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: crashed)
    probe_gpu.cache_clear()
    assert probe_gpu().reason is None and "illegal memory access" in probe_gpu().remarks[0]
    probe_gpu.cache_clear()
    assert os.environ[GPU_OPTIONS] == "plain"
