"""Rates of GPUs, ops as rows of numbers, bounds of their times, and features that explain the excess over the bounds.

No feature identifies a GPU: waves are tiles over SMs, traffic is in units of the L2 cache, arithmetic in units of the
traffic's time. So a regressor learned on some GPUs generalises to GPUs with more SMs. Times are
the bounds times these ratios; the trained trees are ONNX models (TreeEnsembleRegressor) run by ONNX Runtime.

Small boards (T4, P4, L4) never hold their boost clock while they multiply: power rises with clock and voltage, and the
limit is reached far below. The power of arithmetic is ``rate * energy``; the energy of an operation falls with each
process and rises with the square of the clock. The clock under a limit is the boost clock times a power of available
over needed watts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError, install_hint
from gpuprof.estimators.constants import constant, find_constant, process_energy
from gpuprof.estimators.roofline import bandwidth

Array = NDArray[np.float64]

#: Least compute capability of Volta.
VOLTA = 7.0
#: Operations per cycle of the 128 float32 lanes of an SM: a multiply-add counts two. SMs with 128 lanes (Pascal's
#: GP10x, GA10x, Ada, Hopper) have the shared memory of SMs with 64, so that products on CUDA cores feed fewer lanes.
_FLOPS_OF_128_LANES = 256.0
#: Clock in MHz of a GPU of unknown clock.
_CLOCK_MHZ = 1500.0
#: Type of a matrix product's arithmetic where the GPU lacks the precision.
_INSTEAD = {"tfloat32": "float32", "bfloat16": "float16"}
TENSOR_TYPES = frozenset({"tfloat32", "float16", "bfloat16", "int8", "float8", "float4"})


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates of a share of a GPU for ops of one precision; an array holds the rates of an op each (`stack_rates`)."""

    units: Array | float  #: SMs of the share.
    #: ``matrix_per_s``, ``scalar_per_s``: Peak operations a second of matrix products in the precision, and of float32
    #: on CUDA cores.
    matrix_per_s: Array | float
    scalar_per_s: Array | float
    #: ``sustained``, ``sustained_others``: Part of the peak that long products reach under the power limit, and other
    #: kernels near the clock that products leave, in 8 bits that of half precision; in (0, 1].
    sustained: float
    sustained_others: float
    #: ``bytes_per_s``, ``drawn``: Peak bandwidth, and the part of it achieved by long ops.
    bytes_per_s: Array | float
    drawn: float
    l2_bytes: Array | float
    threads: float  #: Maximum threads of an SM.
    tensor: bool  #: Whether products run on tensor cores.
    kernel_s: float  #: Least seconds of a kernel: latencies are a number of cycles.
    cycles_per_s: Array | float  #: Cycles of all SMs together, at the boost clock.
    width: float  #: Bytes of an operand in the products' arithmetic.

    def take(self, rows: NDArray[np.int64]) -> DeviceRates:
        """Return the rates of the ops at positions."""
        arrays: dict[str, Any] = {
            name: rates[rows] for name in _SHARED if isinstance(rates := getattr(self, name), np.ndarray)
        }
        return replace(self, **arrays) if arrays else self


#: Rates that depend on the share.
_SHARED = ("units", "matrix_per_s", "scalar_per_s", "bytes_per_s", "l2_bytes", "cycles_per_s")


def stack_rates(rates: Sequence[DeviceRates], ops: int) -> DeviceRates:
    """Return the rates of several shares of a GPU, each for a number of ops."""
    arrays: dict[str, Any] = {name: np.repeat([getattr(share, name) for share in rates], ops) for name in _SHARED}
    return replace(rates[0], **arrays)


#: Bytes of an operand by type; 4 for other types.
BYTES = {"float64": 8.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "float8": 1.0, "float4": 0.5}


def rates_of(device: Device, precision: str, share: Share | None = None, *, busy: bool = False) -> DeviceRates:
    """Return the rates of ``share`` of ``device`` for products in ``precision``.

    The clock is that of a board with all SMs at work, whatever the share. In MLPerf v2.0 a slice of an A100 with six
    idle neighbours had 1.02 to 1.05 times its part of the whole board's throughput.

    Parameters
    ----------
    busy : bool
        Whether the neighbours work, so that the share gets its part of the DRAM bandwidth and of the L2 cache. Alone on
        the board it can use more of both.

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
    memory = device.fraction(share) if slices is None else slices * share.sm_pct / 100.0
    width = BYTES.get(precision, 4.0)
    narrow = width <= BYTES["float16"] and "float16" in device.flops_per_s
    sustained_others = sustained_part(device, "float16" if narrow else precision)
    return DeviceRates(
        units=max(1.0, device.compute_units * fraction),
        matrix_per_s=peak * fraction,
        scalar_per_s=device.flops_per_s["float32"] * fraction,
        sustained=sustained_part(device, precision),
        sustained_others=sustained_others ** (constant("energy", "others_exponent") if narrow else 1.0),
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
    """Return the time in seconds of the smallest kernel; ``clock_mhz``: 0 if unknown."""
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
    """Return the fraction of its peak bandwidth that a GPU achieves in long ops."""
    kind = (device.dram_type or "").rstrip("23456789xe")  # "hbm2e" is a kind of "hbm", "gddr6x" one of "gddr"
    if kind == "hbm" and float(device.compute_capability or VOLTA) < VOLTA:
        kind = "hbm_before_volta"
    return find_constant("bandwidth", kind, constant("bandwidth", "other"))


def _slices(device: Device, share: Share) -> float | None:
    if share.mig is None or not device.mig_slices:
        return None
    return min(1.0, device.mig_profile(share.mig).memory_slices / device.mig_slices)


#: Families of ops, each with a regressor of its own; ``movement`` shares that of ``elementwise``.
FAMILIES = ("matmul", "conv", "elementwise", "norm", "softmax", "attention", "movement")


@dataclass(frozen=True, slots=True)
class OpTable:
    """Features of N ops, as columns of shape (N,)."""

    family: NDArray[np.int64]  #: Shape (N,). Positions in `FAMILIES`.
    #: ``b``, ``m``, ``n``, ``k``: Shape (N,). Products: number, rows, columns and depth of each; convolutions: their
    #: equivalent product, with groups as ``b``; attention: batch x heads, queries, keys and head size.
    b: Array
    m: Array
    n: Array
    k: Array
    #: ``flops``, ``read_bytes``, ``written_bytes``: Shape (N,).
    flops: Array
    read_bytes: Array
    written_bytes: Array
    #: ``elements``, ``row``: Shape (N,). Elements of the output, and elements normalised together in a row; attention:
    #: queries of a block of threads, 1 where unknown.
    elements: Array
    row: Array
    width: Array  #: Shape (N,). Bytes of an element.
    #: ``kernel``, ``stride``, ``image``: Shape (N,). Convolutions: side of the kernel, stride, side of the output; 0
    #: for other ops.
    kernel: Array
    stride: Array
    image: Array
    #: Shape (N,). Element-wise ops: 1 where they compute a power or the like; attention: heads of keys over heads of
    #: queries; products: 1 where the second operand is no weight.
    extra: Array
    causal: Array  #: Shape (N,). Whether attention is causal.

    def __len__(self) -> int:
        return len(self.family)

    def is_in(self, *families: str) -> NDArray[np.bool_]:
        """Return which ops are of some families, shape (N,)."""
        return np.isin(self.family, [FAMILIES.index(name) for name in families])

    @property
    def bytes_moved(self) -> Array:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    def take(self, rows: Any) -> OpTable:
        """Return the rows at positions, or where a mask is true."""
        return OpTable(*(getattr(self, field.name)[rows] for field in fields(self)))


def stack_tables(tables: Sequence[OpTable]) -> OpTable:
    """Return the ops of all tables, concatenated."""
    return OpTable(*(np.concatenate([getattr(table, field.name) for table in tables]) for field in fields(OpTable)))


def table_of(rows: Iterable[tuple[str, Mapping[str, float]]]) -> OpTable:
    """Return a table of (family, columns), a row each."""
    ops = list(rows)
    names = [field.name for field in fields(OpTable) if field.name != "family"]
    ones = {"b", "m", "n", "k", "row", "width"}
    columns = {
        name: np.array([row.get(name, 1.0 if name in ones else 0.0) for _, row in ops], dtype=float) for name in names
    }
    return OpTable(family=np.array([FAMILIES.index(family) for family, _ in ops], dtype=np.int64), **columns)


_TILES = ((128, 128), (128, 64), (64, 64), (32, 32))
#: Sets of weights used in rotation: in AIConfigurator's products, and in a model, where each layer has its own.
MEASURED_SETS, _SETS_OF_A_MODEL = 5.0, 1000.0
#: Query rows per block of attention, and cycles before and after its arithmetic.
_BLOCK_ROWS, _BLOCK_CYCLES = 128.0, 4000.0
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class OpBounds:
    """Lower bounds of the times of N ops, in seconds."""

    #: Shape (N,). Arithmetic at the rate under the power limit, or traffic at the achieved bandwidth.
    expected_s: Array
    start_s: Array  #: Shape (N,). Of the smallest kernel, or of a framework's preparation before a measured op.
    #: Shape (N,). At the peaks of the data sheet; traffic that fits into the L2 cache at its bandwidth.
    hard_s: Array
    intensity: Array  #: Shape (N,). Log2 of arithmetic over traffic, by the expected times.

    def take(self, rows: NDArray[np.int64]) -> OpBounds:
        """Return the bounds of the ops at positions."""
        return OpBounds(*(getattr(self, field.name)[rows] for field in fields(self)))


def bound_times(
    ops: OpTable, rates: DeviceRates, throttled: Array | float = 1.0, weight_sets: float = MEASURED_SETS
) -> OpBounds:
    """Return the bounds of ``ops`` under the conditions of the published measurements.

    Parameters
    ----------
    throttled : float or ndarray of shape (N,)
        How far the power limit has been reached: 1 in long runs, 0 in an op too short for the clock to fall.
    weight_sets : float
        Number of weight sets that an op used in rotation, which decides whether they stay in the L2 cache.
    """
    conv, attention = ops.is_in("conv"), ops.is_in("attention")
    product = ops.is_in("matmul", "conv", "attention")
    # Winograd's algorithm saves multiplications of 3 x 3 convolutions with stride 1, in tiles of 4 x 4 at most 2.25.
    saves = conv & (ops.kernel == 3) & (ops.stride == 1) & (ops.b == 1) & (not rates.tensor)
    winograd = np.where(saves, 2.25, 1.0)
    peak = ops.flops / winograd / np.where(product, rates.matrix_per_s, rates.scalar_per_s)
    math_s = peak / np.where(product, rates.sustained, rates.sustained_others) ** throttled
    traffic = ops.bytes_moved / rates.bytes_per_s
    dram_s = _draw_seconds(ops, rates, weight_sets)
    blocks = np.where(ops.m > 1.0, ops.b * np.ceil(ops.m / _BLOCK_ROWS), ops.b * ops.extra)
    # The L2 cache has three times the bandwidth of the memory.
    cached = np.where(ops.bytes_moved < rates.l2_bytes, 1.0 / 3.0, 1.0)
    return OpBounds(
        np.maximum(np.maximum(math_s, dram_s) + attention * blocks * _BLOCK_CYCLES / rates.cycles_per_s, _TINY),
        np.full(len(ops), rates.kernel_s),
        np.maximum(np.maximum(peak, traffic * cached), _TINY),
        np.log2(np.maximum(math_s, _TINY) / np.maximum(dram_s, _TINY)),
    )


def weight_seconds(ops: OpTable, rates: DeviceRates) -> Array:
    """Return a lower bound in seconds of products on tensor cores in a model, whose weights are never in the L2 cache.

    Loading of weights overlaps with computation, so the longer of both times counts. It matters on L4 and L40S, with
    much cache and little bandwidth: BERT by TensorRT at batch 1 (bench.ledger).
    """
    if not rates.tensor:
        return np.zeros(len(ops))
    dense = ops.is_in("matmul", "conv") & (ops.b == 1.0)
    return np.where(dense, _draw_seconds(ops, rates, _SETS_OF_A_MODEL) + rates.kernel_s, 0.0)


def block_seconds(ops: OpTable, rates: DeviceRates) -> Array:
    """Return the least seconds of attention by TensorRT's kernels: of a block, which computes a whole head alone."""
    cycles = np.where(ops.row > 1.0, constant("sm", "score_cycles") * ops.row * ops.n, 0.0)
    return np.where(ops.is_in("attention"), cycles * rates.units / rates.cycles_per_s, 0.0)


def _draw_seconds(ops: OpTable, rates: DeviceRates, weight_sets: float) -> Array:
    """Return the seconds of the memory traffic; on tensor cores, traffic still in the L2 cache is faster."""
    per_byte = 1.0 / (rates.bytes_per_s * rates.drawn)
    if not rates.tensor:
        return np.asarray(ops.bytes_moved * per_byte)
    # An SM has 16 bytes per cycle from the L2 cache: a quarter of the peak.
    saved_per_byte = np.maximum(per_byte - 1.0 / (16.0 * rates.cycles_per_s), 0.0)
    dense = ops.is_in("matmul", "conv") & (ops.b == 1.0)
    weights = np.where(dense, np.minimum(ops.width * ops.n * ops.k, ops.read_bytes), 0.0)
    activations = ops.bytes_moved - weights
    used_between = activations + weight_sets * weights
    cached_bytes = activations * _kept_part(activations, rates) + weights * _kept_part(used_between, rates)
    return np.asarray(ops.bytes_moved * per_byte - cached_bytes * saved_per_byte)


def _kept_part(used_between: Array, rates: DeviceRates) -> Array:
    """Return the part of some data still in the L2 cache after ``used_between`` bytes of traffic, its own included."""
    return np.clip(2.0 - 2.0 * used_between / rates.l2_bytes, 0.0, 1.0)


def regressor_names(ops: OpTable, rates: DeviceRates) -> NDArray[np.str_]:
    """Return the name of each op's regressor.

    The published convolutions on CUDA cores are all 3 x 3 with stride 1 (Winograd's); others run as their equivalent
    products.
    """
    cores = {
        "matmul": "matmul_tensor" if rates.tensor else "matmul_cores",
        "conv": "matmul_tensor" if rates.tensor else "conv_cores",
        "movement": "elementwise",
    }
    names = np.array([cores.get(family, family) for family in FAMILIES])[ops.family]
    unlike = (names == "conv_cores") & ~((ops.kernel == 3) & (ops.stride == 1))
    return np.where(unlike, "matmul_cores", names)


def attention_kinds(ops: OpTable) -> NDArray[np.str_]:
    """Return the kind of each op as attention: a token of generation, causal context, or an encoder's."""
    return np.where((ops.m == 1.0) & (ops.n > 1.0), "generation", np.where(ops.causal > 0, "context", "encoder"))


def features_of(name: str, ops: OpTable, rates: DeviceRates, bounds: OpBounds) -> Array:
    """Return the features of ops for the regressor ``name``.

    Returns
    -------
    ndarray of shape (N, F)
        F is the regressor's own.
    """
    if name in ("matmul_cores", "matmul_tensor", "conv_cores"):
        columns = _product_features(ops, rates, bounds)
        if name == "conv_cores":
            columns += [ops.kernel, ops.stride, np.log2(np.maximum(ops.image, 1.0))]
        else:
            columns += [ops.width, ops.extra]
    elif name == "attention":
        columns = _attention_features(ops, rates, bounds)
    else:
        columns = _row_features(ops, rates)
        if name == "elementwise":
            columns = [*columns[:2], ops.extra, ops.read_bytes / np.maximum(ops.written_bytes, 1.0)]
        elif name == "softmax":
            # Long rows are read several times: again from the L2 cache where the rows in progress fit into it.
            blocks = rates.units * rates.threads / 128.0  # a block of 128 threads per row
            columns.append(np.log2(np.maximum(ops.row, 1.0) * ops.width * blocks / rates.l2_bytes))
    return np.column_stack(columns)


def _product_features(ops: OpTable, rates: DeviceRates, bounds: OpBounds) -> list[Array]:
    columns = []
    for rows, cols in _TILES:
        down, across = np.ceil(ops.m / rows), np.ceil(ops.n / cols)
        waves = ops.b * down * across / rates.units
        fill = ops.m * ops.n / (down * rows * across * cols)
        columns += [np.log2(waves), waves / np.ceil(waves) * fill]
    aligned = [(size % 4 == 0) * 1.0 + (size % 32 == 0) for size in (ops.m, ops.n, ops.k)]
    traffic = np.log2(np.maximum(ops.bytes_moved, 1.0) / rates.l2_bytes)
    short, long = np.log2(np.minimum(ops.m, ops.n)), np.log2(np.maximum(ops.m, ops.n))
    return [*columns, np.log2(ops.k), short, long, np.log2(ops.n / ops.m), bounds.intensity, traffic, *aligned]


def _attention_features(ops: OpTable, rates: DeviceRates, bounds: OpBounds) -> list[Array]:
    waves = ops.b * np.ceil(ops.m / 128) / rates.units
    fill = ops.m / (np.ceil(ops.m / 128) * 128)
    traffic = np.log2(np.maximum(ops.bytes_moved, 1.0) / rates.l2_bytes)
    work = np.log2(np.maximum(ops.b * ops.m * ops.n, 1.0) / rates.units)
    sizes = [np.log2(ops.m), np.log2(ops.n), np.log2(ops.k)]
    whole = waves / np.ceil(waves)
    kinds = [ops.extra, ops.causal, ops.width, ops.kernel, ops.stride]
    return [np.log2(waves), whole, fill, *sizes, work, bounds.intensity, traffic, *kinds]


def _row_features(ops: OpTable, rates: DeviceRates) -> list[Array]:
    traffic = np.maximum(ops.bytes_moved, 1.0)
    rows = np.maximum(ops.elements, 1.0) / np.maximum(ops.row, 1.0)
    return [
        np.log2(traffic / rates.l2_bytes),
        np.log2(np.maximum(ops.elements, 1.0) / rates.units / rates.threads),
        np.log2(np.maximum(ops.row, 1.0)),
        np.log2(rows / rates.units),
        (ops.row % 4 == 0) * 1.0,
    ]


class Forest:
    """A sum of trees.

    Parameters
    ----------
    content : bytes
        An ONNX model whose only node is a TreeEnsembleRegressor in double precision.
    name : str
        Name of the model in errors.
    """

    def __init__(self, content: bytes, name: str) -> None:
        try:
            import onnxruntime
        except ImportError:
            message = "estimates for GPUs without measurements need ONNX Runtime, which is not installed"
            raise UnavailableError(message, install_hint("cpu")) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # sums in one order on every machine
        options.log_severity_level = 4  # fatal errors only
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises classes of its own
            raise InputError(f"{name} is no regressor that gpuprof trained: {error}", "reinstall gpuprof") from None
        # Trees without splits on the last features declare fewer features.
        (declared,) = self._session.get_inputs()
        self._width = declared.shape[1] if isinstance(declared.shape[1], int) else None

    def predict(self, rows: Array) -> Array:
        """Return the sum of the leaves of each row.

        Parameters
        ----------
        rows : ndarray of shape (N, F)

        Returns
        -------
        ndarray of shape (N,)
        """
        if not len(rows):
            return np.zeros(0)
        inputs = np.ascontiguousarray(rows[:, : self._width], dtype=np.float64)
        return np.asarray(self._session.run(None, {"features": inputs})[0], dtype=np.float64).reshape(-1)


class Forests(dict[str, Forest]):
    """Forests by name, each opened on first use: an answer needs few of the shipped forests."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        super().__init__()
        self._contents = contents

    def __missing__(self, name: str) -> Forest:
        """Open a forest. Raises `InputError` as `Forest` does."""
        self[name] = Forest(self._contents[name], name)
        return self[name]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Regressors by name."""

    forests: Mapping[str, Forest]  #: `regressor_names` → trees.

    def kernel_times(self, ops: OpTable, rates: DeviceRates, bounds: OpBounds | None = None) -> Array:
        """Return the GPU seconds of each op without its launch, at least its physical bound.

        ``bounds``: those of a measurement; by default those of ops of a model, at the power limit.

        Returns
        -------
        ndarray of shape (N,)
        """
        least_s = np.zeros(len(ops))
        if bounds is None:
            least_s = np.maximum(weight_seconds(ops, rates), block_seconds(ops, rates))
            bounds = bound_times(ops, rates)
        times = np.zeros(len(ops))
        names = regressor_names(ops, rates)
        for name in sorted(set(names.tolist())):
            rows = np.flatnonzero(names == name)
            of_rows = bounds.take(rows)
            group = ops.take(rows)
            ratio = np.exp(self.forests[name].predict(features_of(name, group, rates.take(rows), of_rows)))
            seconds = np.maximum((of_rows.expected_s + of_rows.start_s) * ratio, least_s[rows])
            times[rows] = np.maximum(_add_convolving(group, seconds) if rates.tensor else seconds, of_rows.hard_s)
        return times


def _add_convolving(ops: OpTable, seconds: Array) -> Array:
    """Return ``seconds`` with the extra time of convolutions on tensor cores added; other ops are unchanged."""
    conv = ops.is_in("conv")
    odd = conv & (ops.b > 1.0) & (np.log2(ops.n) % 1.0 > 0.0)
    slower = np.where(odd, constant("sm", "odd_groups"), 1.0)
    return np.asarray(seconds * slower + np.where(conv, constant("sm", "convolution_s"), 0.0))
