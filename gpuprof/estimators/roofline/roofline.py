"""Time of a model from its operations and bytes and the peak rates of a device (Williams et al., 2009), op by op."""

from __future__ import annotations

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import ROOFLINE, UNCALIBRATED
from gpuprof.domain.share import Share
from gpuprof.estimators.constants import constant
from gpuprof.estimators.roofline.op_work import MATRIX_OPS, Array, GraphWork

#: Key of `Device.sources` for rates measured on the device.
CEILINGS = "ceilings"

#: Work not worth dividing further between SMs: a step of a 64 x 64 x 64 tile, and the bytes fetched by the 2048 threads
#: of an SM at 16 bytes each.
_TILE_FLOPS = 2.0 * 64**3
_FETCH_BYTES = 2048 * 16.0
#: Half of a GPU's SMs draw all of its bandwidth: an SM's outstanding requests cover about twice its fair part.
_BANDWIDTH_REACH = 2.0
_FALLBACK_TYPE = "float32"


def roofline_ms(work: GraphWork, device: Device, share: Share) -> float:
    """Return the least time in milliseconds of an execution on ``share`` of ``device``."""
    return float(op_times_s(work, device, share).sum() * 1e3)


def op_times_s(work: GraphWork, device: Device, share: Share) -> Array:
    """Return the least time of each op in seconds: of its arithmetic or its traffic, and its launches.

    A recurrent op on a GPU is a product for the inputs of all steps and then a kernel per step, as in cuDNN's standard
    algorithm, which ONNX Runtime selects; each step has only its part of the work to fill the SMs. Persistent kernels,
    which stay for all steps and synchronise the whole GPU between them, are not assumed.

    Returns
    -------
    ndarray of shape (N,)
    """
    fraction = device.granted_fraction(share)
    matrix = np.array([op in MATRIX_OPS for op in work.op_types])
    peak = np.array([_peak(device, dtype, is_matrix) for dtype, is_matrix in zip(work.dtypes, matrix, strict=True)])
    busy = loaded = launches = np.ones(len(peak))
    if device.kind == "gpu":  # an op too small for all SMs leaves some of them idle
        units = max(1.0, device.compute_units * fraction)
        steps = np.array(work.steps) if work.steps else np.ones(len(peak))
        busy = np.clip(np.ceil(work.flops / steps / _TILE_FLOPS) / units, 1.0 / units, 1.0)
        fetches = np.ceil(work.bytes_moved / steps / _FETCH_BYTES)
        loaded = np.clip(_BANDWIDTH_REACH * fetches / units, 1.0 / units, 1.0)
        launches = np.where(steps > 1, steps + 1, 1)
    arithmetic = work.flops / (peak * fraction * busy)
    traffic = work.bytes_moved / (bandwidth(device, share) * loaded)
    launched = launches * ((work.flops > 0) | (work.bytes_moved > 0))
    return np.asarray(np.maximum(arithmetic, traffic) + launched * _launch_us(device) * 1e-6)


def dispatch_ms(work: GraphWork, device: Device) -> float:
    """Return a CPU's additional time for dispatching ops in milliseconds, which `roofline_ms` leaves out."""
    return 0.0 if device.kind == "gpu" else len(work.op_types) * constant("roofline", "dispatch_us") * 1e-3


def unknown_ms(work: GraphWork, device: Device, share: Share) -> float:
    """Return the possible extra milliseconds of ops without a formula beyond `roofline_ms`."""
    if not work.unknown_ops:
        return 0.0
    unknown = np.array([op in work.unknown_ops for op in work.op_types], dtype=bool)
    if not unknown.any():
        return 0.0
    times = op_times_s(work, device, share)
    dearest = float(times[~unknown].max(initial=0.0))
    return float(np.maximum(constant("roofline", "dearest") * times[unknown], dearest).sum() * 1e3)


def bandwidth(device: Device, share: Share) -> float:
    """Return the bytes per second available to ``share``: by a MIG instance's slices, else by its units' requests."""
    if share.mig is not None and device.mig_slices:
        slices = device.mig_profile(share.mig).memory_slices / device.mig_slices
        return device.dram_bytes_per_s * min(slices, 1.0) * min(1.0, _BANDWIDTH_REACH * share.sm_pct / 100.0)
    return device.dram_bytes_per_s * min(1.0, _BANDWIDTH_REACH * device.granted_fraction(share))


def reread_bandwidth(device: Device, share: Share, touched: Array) -> Array:
    """Return the bytes per second at which ``share`` rereads data at a reuse distance of ``touched`` bytes.

    Caches belong to cores, so that a share has a proportional part of their bandwidth; beyond the caches, or if they
    were not measured, `bandwidth` applies.

    Parameters
    ----------
    touched : ndarray of shape (N,)
        Bytes, infinite where unknown.

    Returns
    -------
    ndarray of shape (N,)
    """
    beyond = bandwidth(device, share)
    if not device.reread_bytes_per_s:
        return np.full(len(touched), beyond)
    sizes, rates = np.array(device.reread_bytes_per_s).T
    parts = np.where(sizes <= device.l2_bytes, device.granted_fraction(share), beyond / device.dram_bytes_per_s)
    return np.asarray(np.exp(np.interp(np.log(np.maximum(touched, 1.0)), np.log(sizes), np.log(rates * parts))))


def source_of(device: Device) -> str:
    """Return the source of a roofline figure on ``device``: uncalibrated unless its rates were measured."""
    return ROOFLINE if CEILINGS in device.sources else UNCALIBRATED


def _launch_us(device: Device) -> float:
    return device.launch_overhead_us or (constant("roofline", "launch_us") if device.kind == "gpu" else 0.0)


def _peak(device: Device, dtype: str, matrix: bool) -> float:
    rates = device.flops_per_s
    # ONNX Runtime's CUDA provider multiplies float32 matrices in TF32 unless told otherwise.
    if matrix and dtype == "float32" and "tfloat32" in rates:
        return rates["tfloat32"]
    return rates.get(dtype) or rates[_FALLBACK_TYPE]
