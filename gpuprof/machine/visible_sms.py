"""Number of SMs that CUDA grants this process: all, or fewer under an MPS percentage."""

from __future__ import annotations

import ctypes

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
