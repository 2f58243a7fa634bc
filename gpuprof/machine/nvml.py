"""Access to NVML, if installed, and to CUDA's driver; unsupported queries return None."""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any


def load_nvml() -> Any:
    """Return the module ``pynvml``; None if nvidia-ml-py is not installed."""
    try:
        return import_module("pynvml")
    except ImportError:
        return None


def ask_nvml(nvml: Any, function: str, *arguments: Any) -> Any:
    """Return NVML's answer, or None for a query unsupported by the GPU, the driver or the binding."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def decode_nvml(text: str | bytes) -> str:
    """Return a text of NVML, which older bindings return as bytes."""
    return text.decode(errors="replace") if isinstance(text, bytes) else text


_DRIVER = "libcuda.so.1"
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


def visible_sms(driver: str = _DRIVER) -> int | None:
    """Return the SMs of the first GPU available to this process; None without a driver or an answer from the driver.

    An MPS client sees its percentage of the SMs. ``driver``: CUDA's driver library.
    """
    try:
        # The driver rather than NVML: only the driver reports the SMs granted to this process.
        cuda = ctypes.CDLL(driver)
    except OSError:
        return None
    device, count = ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if cuda.cuDeviceGetAttribute(ctypes.byref(count), _MULTIPROCESSOR_COUNT, device):
        return None
    return count.value
