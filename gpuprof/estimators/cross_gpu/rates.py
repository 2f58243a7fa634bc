"""Sustained rates of GPUs: arithmetic under the power limit, and bandwidth by kind of memory.

Small boards (T4, P4, L4) never hold their boost clock while they multiply: power rises with clock and voltage, and the
limit is reached far below. The power of arithmetic is ``rate * energy``; the energy of an operation falls with each
process and rises with the square of the clock. The clock under a limit is the boost clock times a power of available
over needed watts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.constants import constant, find_constant, process_energy
from gpuprof.estimators.roofline import bandwidth

#: Least compute capability of Volta.
VOLTA = 7.0
#: Operations per cycle of the 128 float32 lanes of an SM: a multiply-add counts two. SMs with 128 lanes (Pascal's
#: GP10x, GA10x, Ada, Hopper) have the shared memory of SMs with 64, so that products on CUDA cores feed fewer lanes.
_FLOPS_OF_128_LANES = 256.0
#: Clock in MHz of a GPU of unknown clock, and that of the preparation in trained regressors.
_CLOCK_MHZ = 1500.0
#: Type of a matrix product's arithmetic where the GPU lacks the precision.
_INSTEAD = {"tfloat32": "float32", "bfloat16": "float16"}
TENSOR_TYPES = frozenset({"tfloat32", "float16", "bfloat16", "int8", "float8", "float4"})


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates of a share of a GPU for ops of one precision."""

    units: float  #: SMs of the share.
    #: ``matrix_per_s``, ``scalar_per_s``: Peak operations a second of matrix products in the precision, and of float32
    #: on CUDA cores.
    matrix_per_s: float
    scalar_per_s: float
    #: ``sustained``, ``sustained_others``: Part of the peak that long products reach under the power limit, and other
    #: kernels at the clock that products leave, in 8 bits at that of half precision; in (0, 1].
    sustained: float
    sustained_others: float
    #: ``bytes_per_s``, ``drawn``: Peak bandwidth, and the part of it achieved by long ops.
    bytes_per_s: float
    drawn: float
    l2_bytes: float
    threads: float  #: Maximum threads of an SM.
    tensor: bool  #: Whether products run on tensor cores.
    kernel_s: float  #: Least seconds of a kernel: latencies are a number of cycles.
    cycles_per_s: float  #: Cycles of all SMs together, at the boost clock.
    width: float  #: Bytes of an operand in the products' arithmetic.


#: Bytes of an operand by type; 4 for other types.
_BYTES = {"float64": 8.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "float8": 1.0, "float4": 0.5}


def rates_of(device: Device, precision: str, share: Share | None = None, *, busy: bool = False) -> DeviceRates:
    """Return the rates of ``share`` of ``device`` for products in ``precision``.

    The clock is that of a board with all SMs at work, whatever the share. In MLPerf v2.0 a slice of an A100 with six
    idle neighbours did 1.02 to 1.05 times its part of the whole board's work.

    Parameters
    ----------
    busy : bool
        Whether the neighbours work, so that the share gets its part of the DRAM bandwidth and of the L2 cache. Alone on
        the board it reaches for more of both.

    Raises
    ------
    InputError
        When the GPU has no rate for the precision.
    """
    share = share or Share()
    peak = device.flops_per_s.get(precision)
    if peak is None:
        precisions = ", ".join(sorted(device.flops_per_s))
        raise InputError(f"{device.name} has no {precision} arithmetic", f"it has {precisions}")
    fraction, slices = device.granted_fraction(share), _slices(device, share)
    memory = fraction if slices is None else slices * share.sm_pct / 100.0
    width = _BYTES.get(precision, 4.0)
    others = "float16" if width < _BYTES["float16"] and "float16" in device.flops_per_s else precision
    return DeviceRates(
        units=max(1.0, device.compute_units * fraction),
        matrix_per_s=peak * fraction,
        scalar_per_s=device.flops_per_s["float32"] * fraction,
        sustained=sustained_part(device, precision),
        sustained_others=sustained_part(device, others),
        bytes_per_s=device.dram_bytes_per_s * memory if busy else bandwidth(device, share),
        drawn=_drawn_part(device),
        l2_bytes=max(1.0, device.l2_bytes * (memory if busy else _slices(device, share) or 1.0)),
        threads=device.sm.threads if device.sm is not None else 2048,
        tensor=precision in TENSOR_TYPES and not (precision == "int8" and float(device.compute_capability or 0) < 7),
        kernel_s=smallest_kernel_s(device.clock_mhz),
        cycles_per_s=device.compute_units * fraction * (device.clock_mhz or _CLOCK_MHZ) * 1e6,
        width=width,
    )


def smallest_kernel_s(clock_mhz: float = 0.0) -> float:
    """Return the seconds of the smallest kernel; 0: at the clock of the trained regressors' preparation."""
    return constant("sm", "kernel_cycles") / (clock_mhz or _CLOCK_MHZ) / 1e6


def sustained_part(device: Device, precision: str) -> float:
    """Return the part of its peak rate that a GPU sustains in long products, limited by operand feeding and power."""
    lane_part = 1.0
    if precision == "float32" and device.clock_mhz:
        each = device.flops_per_s["float32"] / (device.compute_units * device.clock_mhz * 1e6)
        lane_part = constant("sm", "lanes_128") if each > 0.9 * _FLOPS_OF_128_LANES else 1.0
    reference = process_energy(device.process_nm)
    if reference is None or not device.max_power_w or not device.clock_mhz:
        return lane_part
    watts, clock = reference
    energy = watts * find_constant("energy.type", precision, 1.0) * (_clock_of_peak(device, precision) / clock) ** 2
    if precision in TENSOR_TYPES and int(float(device.compute_capability or 0)) == VOLTA:
        energy *= constant("energy", "first_tensor_cores")
    stacked = (device.dram_type or "").startswith("hbm")
    by_memory = constant("energy", "stacked_w_per_gb_s") * device.dram_bytes_per_s / 1e9 if stacked else 0.0
    rest = constant("energy", "board_w") + by_memory
    needed = device.flops_per_s[precision] / 1e12 * energy
    return float(min(lane_part, (max(1.0, device.max_power_w - rest) / needed) ** constant("energy", "clock_exponent")))


def _clock_of_peak(device: Device, precision: str) -> float:
    """Return the clock in MHz of the specified peak rate of a type.

    For tensor cores it may be below the boost clock (H100: 1,830 of 1,980 MHz); an SM's multiplications per cycle are a
    power of two.
    """
    boost = device.clock_mhz or _CLOCK_MHZ
    if precision not in TENSOR_TYPES:
        return boost
    each = device.flops_per_s[precision] / (device.compute_units * boost * 1e6)
    return float(min(boost, boost * each / 2.0 ** round(log2(each))))


def resolve_precision(device: Device, precision: str) -> str:
    """Return the type of the GPU's products for ``precision``: float32 in place of TF32 where it lacks TF32."""
    while precision not in device.flops_per_s and precision in _INSTEAD:
        precision = _INSTEAD[precision]
    return precision


def _drawn_part(device: Device) -> float:
    """Return the part of its peak bandwidth that a GPU achieves in long ops."""
    kind = (device.dram_type or "").rstrip("23456789xe")  # "hbm2e" is a kind of "hbm", "gddr6x" one of "gddr"
    if kind == "hbm" and float(device.compute_capability or VOLTA) < VOLTA:
        kind = "hbm_before_volta"
    return find_constant("bandwidth", kind, constant("bandwidth", "other"))


def _slices(device: Device, share: Share) -> float | None:
    if share.mig is None or not device.mig_slices:
        return None
    return min(1.0, device.mig_profile(share.mig).memory_slices / device.mig_slices)
