"""Access to NVML, if installed; unsupported queries return None."""

from __future__ import annotations

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
