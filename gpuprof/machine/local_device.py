"""The devices of this machine."""

from __future__ import annotations

from gpuprof.machine.cpu import local_cpu
from gpuprof.machine.gpu import local_gpus

__all__ = ["local_cpu", "local_gpus"]
