"""How many SMs CUDA gives this process: all, or under an MPS percentage fewer."""

from __future__ import annotations

import ctypes

_DRIVER = "libcuda.so.1"
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


def visible_sms(driver: str = _DRIVER) -> int | None:
    """Return the SMs of the first GPU that this process may use; None where there is no driver or it does not say.

    A client of MPS sees its percentage of the SMs. ``driver``: CUDA's driver library.
    """
    try:
        # The driver and not NVML: only the driver knows what this process was given.
        cuda = ctypes.CDLL(driver)
    except OSError:
        return None
    device, count = ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if cuda.cuDeviceGetAttribute(ctypes.byref(count), _MULTIPROCESSOR_COUNT, device):
        return None
    return count.value
