"""A GPU played by the CPU: sessions that accept or refuse options, and host memory for the device's."""

import ctypes
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuprof.errors import UnavailableError
from gpuprof.runtime import gpu_session
from gpuprof.runtime.providers import ORT_TENSORRT
from gpuprof.runtime.session import open_session


class PlayedMemory:
    """Copies of the CUDA runtime among host addresses."""

    def __init__(self) -> None:
        self.copied = 0

    def allocate(self, size: int) -> Any:
        return np.zeros(size, np.uint8)

    def copy(self, target: int, source: int, size: int, kind: int) -> None:
        self.copied += 1
        ctypes.memmove(target, source, size)


class PlayedSession:
    """A CPU session for a GPU's."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def play_gpu(
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[[Mapping[str, str]], None],
    wrap: Callable[[Any, Mapping[str, str]], Any] = lambda session, options: session,
) -> list[Mapping[str, str]]:
    """Play ONNX Runtime's provider, on which batches take no time.

    ``refuse`` raises for options, ``wrap`` changes the session.
    """
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    calls: list[Mapping[str, str]] = []

    def open_played(path: Path, *, threads: int, provider: str, provider_options: Mapping[str, str]) -> Any:
        if provider == ORT_TENSORRT:
            raise UnavailableError("libnvinfer.so.10 cannot be loaded")
        calls.append(provider_options)
        refuse(provider_options)
        return wrap(open_session(path, threads=threads), provider_options)

    monkeypatch.setattr(gpu_session, "open_session", open_played)
    return calls
