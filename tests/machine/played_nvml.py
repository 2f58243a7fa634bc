"""NVML with the answers of a test."""

from types import SimpleNamespace
from typing import Any


class FakeNvmlError(Exception):
    """What the binding raises for whatever a GPU does not have."""


class PlayedNvml:
    """Answers each function with the value that a test gives it: a constant, a function, or an error to raise."""

    NVMLError = FakeNvmlError

    def __init__(self, **answers: Any) -> None:
        self._answers = {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1, **answers}

    def __getattr__(self, name: str) -> Any:
        if name not in self._answers:
            raise AttributeError(name)
        answer = self._answers[name]
        if not name.startswith("nvml"):
            return answer

        def function(*arguments: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return function


def mig_gpu(*instances: str | None) -> PlayedNvml:
    """Return a GPU with slots for MIG devices, some empty; without slots, a GPU that has no MIG."""

    def find_slot(_: object, slot: int) -> int:
        if instances[slot] is None:
            raise FakeNvmlError
        return slot

    name = "NVIDIA A100-SXM4-80GB"
    return PlayedNvml(
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
        nvmlDeviceGetName=lambda h: f"{name} MIG {instances[h]}" if isinstance(h, int) else name,
        nvmlDeviceGetUUID=lambda h: (f"MIG-{h}" if isinstance(h, int) else h).encode(),
        nvmlDeviceGetMaxMigDeviceCount=len(instances) or FakeNvmlError(),
        nvmlDeviceGetMigDeviceHandleByIndex=find_slot,
        nvmlDeviceGetGpuInstanceId=lambda slot: slot,
        nvmlDeviceGetGpuInstanceById=lambda _, slot: slot,
        nvmlGpuInstanceGetInfo=lambda slot: SimpleNamespace(placement=SimpleNamespace(start=4 * slot)),
    )
