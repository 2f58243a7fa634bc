"""The devices of this machine."""

from __future__ import annotations

from gpuprof.local_cpu import local_cpu
from gpuprof.local_gpu import local_gpus

__all__ = ["local_cpu", "local_gpus"]
