"""The published measurements as tables of ops, from the data that ships with gpuprof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gpuprof.domain.catalogue import datasets, device_of_driver
from gpuprof.estimators.cross_gpu.features import FAMILIES, MEASURED_SETS, Array, OpTable

#: Boards with the same chip: who leaves one out leaves out all.
CHIP = MappingProxyType({"a100-40": "a100", "a100-pcie-40": "a100", "a100-pcie-80": "a100", "a100-80": "a100"})
#: Frameworks by the number that stands for them in the features of products and attention.
FRAMEWORKS = ("VLLM", "TRTLLM", "SGLang")
_BINARY, _SCALAR, _UNARY = ("add", "mul", "div", "pow"), ("addu", "mulu", "divu", "powu"), ("relu", "gelu", "tanh")
#: Name of the tables' families → op of NeuSight's.
OP_FAMILIES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "linear": ("linear",),
        "bmm": ("bmm",),
        "conv": ("conv",),
        "layer norm": ("ln",),
        "softmax": ("softmax",),
        "element-wise": (*_BINARY, *_SCALAR, *_UNARY),
    }
)
#: Generations whose long products NeuSight's sweep found at a fraction of the rate of the same sizes measured apart:
#: passive boards that grew hot (P4), and kernels of two generations before (P100, Maxwell's). Not learned from.
_UNFIT_PRODUCTS = ("p4", "p100")
_FLOAT32_BYTES = 4.0
#: A sweep of single short products does not reach the power limit: how long, in log10 of ms, until it does.
_REACHED = {("bmm", "test"): (0.2, 1.2), ("bmm", "train"): (-0.7, 0.3), ("conv", "train"): (0.2, 1.8)}


@dataclass(frozen=True, slots=True)
class MeasuredOps:
    """Published times of ops of one family in one precision."""

    name: str  #: Family in the words of the tables, `OP_FAMILIES` or ``"gemm"`` and the like.
    precision: str
    ops: OpTable
    seconds: Array  #: Shape (N,). With what launching and timing cost, unless ``kernels_only``.
    device: NDArray[np.str_]  #: Shape (N,). Names in the catalogue.
    split: NDArray[np.str_]  #: Shape (N,). ``"train"`` or ``"test"``, as the authors have it.
    kernels_only: bool

    def take(self, rows: Any) -> MeasuredOps:
        """Return the rows at positions, or where a mask is true."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        kept = {name: columns[name].take(rows) if name == "ops" else columns[name][rows] for name in _PER_ROW}
        return MeasuredOps(**{**columns, **kept})

    def estimate_throttling(self, bound_s: Array) -> Array:
        """Return how far the power limit was reached in each measurement, in [0.5, 1]; see `features.bound_times`."""
        if self.name not in ("bmm", "conv"):
            return np.ones(len(bound_s))
        from_, to = np.array([_REACHED[self.name, split] for split in self.split]).T
        return np.asarray(np.clip((np.log10(bound_s * 1e3) - from_) / (to - from_), 0.5, 1.0))

    @property
    def weight_sets(self) -> float:
        """How many sets of weights each product was run with in turn; see `features.bound_times`."""
        return MEASURED_SETS if self.kernels_only else 1.0

    def fit_to_learn(self) -> NDArray[np.bool_]:
        """Tell which rows say how the GPU computes, and not how hot it was."""
        if self.name != "linear":
            return np.ones(len(self.seconds), dtype=bool)
        return ~np.isin(self.device, _UNFIT_PRODUCTS)


_PER_ROW = ("ops", "seconds", "device", "split")


def make_table(family: str, count: int, **columns: Any) -> OpTable:
    """Return ``count`` ops of a family; absent columns are 0, ``b``, ``m``, ``n``, ``k``, ``row``, ``width`` 1."""
    values = {name: np.broadcast_to(np.asarray(value, dtype=float), count).copy() for name, value in columns.items()}
    ones = dict.fromkeys(("b", "m", "n", "k", "row", "width"), np.ones(count))
    zeros = {field.name: np.zeros(count) for field in fields(OpTable)}
    family_column = np.full(count, FAMILIES.index(family))
    return OpTable(**{**zeros, **ones, **values, "family": family_column})


def neusight_ops(family: str) -> MeasuredOps:
    """Return NeuSight's ops of a family of `OP_FAMILIES`, all float32 on CUDA cores."""
    with (datasets() / "neusight" / "ops.parquet").open("rb") as file:
        table = pq.read_table(file, filters=pc.field("op").isin(OP_FAMILIES[family]))
    columns = {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}
    return MeasuredOps(
        family,
        "float32",
        _make_table(family, columns),
        columns["latency_ms"].astype(float) / 1e3,
        columns["device"].astype(str),
        columns["split"].astype(str),
        kernels_only=False,
    )


@dataclass(frozen=True, slots=True)
class PublishedLaunches:
    """How NeuSight's ops of a family were launched, in the order of `neusight_ops`: their longest kernel."""

    kernel: NDArray[np.str_]  #: Shape (N,). Name.
    #: ``blocks``, ``threads``: Shape (N,). Blocks of the grid, threads of a block; 0 where they were not recorded.
    blocks: NDArray[np.int64]
    threads: NDArray[np.int64]


def neusight_launches(family: str) -> PublishedLaunches:
    """Return the launches of NeuSight's ops of a family of `OP_FAMILIES`."""
    sides = [f"{part}_{axis}" for part in ("grid", "block") for axis in "xyz"]
    with (datasets() / "neusight" / "ops.parquet").open("rb") as file:
        table = pq.read_table(file, columns=["op", "kernel", *sides], filters=pc.field("op").isin(OP_FAMILIES[family]))
    size = {name: pc.fill_null(table.column(name), 0).to_numpy().astype(np.int64) for name in sides}
    kernel = pc.fill_null(table.column("kernel"), "").to_numpy(zero_copy_only=False).astype(str)
    blocks, threads = (np.prod([size[f"{part}_{axis}"] for axis in "xyz"], axis=0) for part in ("grid", "block"))
    return PublishedLaunches(kernel, blocks, threads)


def aiconfigurator_ops(kind: str, most: int | None = None, seed: int = 0) -> list[MeasuredOps]:
    """Return AIConfigurator's ops of a kind (``"gemm"``, ``"context_attention"`` …), a precision each.

    Parameters
    ----------
    most : int, optional
        Rows of each precision, drawn at random; by default all.
    """
    with (datasets() / "aiconfigurator" / f"{kind}.parquet").open("rb") as file:
        table = pq.read_table(file)
    columns = {name: _plain(table.column(name)) for name in table.column_names}
    names = {driver: device_of_driver(str(driver)) for driver in np.unique(columns["device"])}
    device = np.array([board.name if (board := names[driver]) else "" for driver in columns["device"]])
    types = columns["gemm_dtype" if kind == "gemm" else "attn_dtype"]
    measured = []
    for kept in np.unique(types):
        rows = np.flatnonzero(types == kept)
        if most is not None and len(rows) > most:
            rows = np.sort(np.random.default_rng(seed).choice(rows, most, replace=False))
        part = {name: column[rows] for name, column in columns.items()}
        ops = _gemm(part) if kind == "gemm" else _attention(part, kind)
        seconds = part["latency_ms"].astype(float) / 1e3
        precision = {"fp8": "float8"}.get(str(kept), str(kept))
        split = np.full(len(rows), "train")
        measured.append(MeasuredOps(kind, precision, ops, seconds, device[rows], split, kernels_only=True))
    return measured


def _plain(column: Any) -> NDArray[Any]:
    values = column.to_numpy(zero_copy_only=False)
    return np.asarray(values.astype(str) if values.dtype == object else values)


_Columns = Mapping[str, NDArray[Any]]


def _float(columns: _Columns, *names: str) -> list[Array]:
    return [columns[name].astype(float) for name in names]


def _product(columns: _Columns, batched: bool) -> OpTable:
    b, m, n, k = _float(columns, "b", "m", "n", "k")
    if not batched:
        b, m = np.ones(len(b)), b * m
    return product_table(b, m, n, k, _FLOAT32_BYTES, _FLOAT32_BYTES, float(batched))


def product_table(b: Array, m: Array, n: Array, k: Array, width: float, out: float, extra: Any) -> OpTable:
    """Return a table of matrix products whose operands have ``width`` bytes an element, results ``out``."""
    return make_table(
        "matmul",
        len(b),
        **{"b": b, "m": m, "n": n, "k": k, "width": width, "extra": extra},
        flops=2.0 * b * m * n * k,
        read_bytes=width * b * (m * k + n * k),
        written_bytes=out * b * m * n,
        elements=b * m * n,
    )


def _conv(columns: _Columns) -> OpTable:
    b, ins, outs, kernel = _float(columns, "b", "in_channels", "out_channels", "kernel_size")
    size, stride, padding = _float(columns, "input_size", "stride", "padding")
    image = np.floor((size + 2 * padding - kernel) / stride) + 1
    pixels, depth = b * image**2, ins * kernel**2
    return make_table(
        "conv",
        len(b),
        **{"m": pixels, "n": outs, "k": depth, "width": _FLOAT32_BYTES},
        flops=2.0 * pixels * outs * depth,
        read_bytes=_FLOAT32_BYTES * (b * ins * size**2 + outs * depth),
        written_bytes=_FLOAT32_BYTES * pixels * outs,
        elements=pixels * outs,
        kernel=kernel,
        stride=stride,
        image=image,
    )


def _rows(columns: _Columns, family: str) -> OpTable:
    b, h = _float(columns, "b", "h")
    op = columns["op"].astype(str)
    moved = _FLOAT32_BYTES * b * h
    return make_table(
        family,
        len(b),
        read_bytes=moved * np.where(np.isin(op, _BINARY), 2.0, 1.0),
        written_bytes=moved,
        flops=b * h,
        elements=b * h,
        row=h,
        width=_FLOAT32_BYTES,
        extra=np.isin(op, ("pow", "powu")) * 1.0,
    )


def _make_table(family: str, columns: _Columns) -> OpTable:
    if family in ("linear", "bmm"):
        return _product(columns, batched=family == "bmm")
    if family == "conv":
        return _conv(columns)
    return _rows(columns, {"layer norm": "norm", "element-wise": "elementwise"}.get(family, family))


def _framework(columns: _Columns) -> Array:
    return np.array([float(FRAMEWORKS.index(str(name))) for name in columns["framework"]])


def _gemm(columns: _Columns) -> OpTable:
    m, n, k = _float(columns, "m", "n", "k")
    width = 1.0 if columns["gemm_dtype"][0] == "fp8" else 2.0
    return product_table(np.ones(len(m)), m, n, k, width, 2.0, _framework(columns))


def _attention(columns: _Columns, kind: str) -> OpTable:
    batch, heads, size, length = _float(columns, "batch_size", "num_heads", "head_dim", "isl")
    generation, encoder = kind == "generation_attention", kind == "encoder_attention"
    keys = length + columns["step"].astype(float) if generation else length
    window = np.zeros(len(keys)) if encoder else columns["window_size"].astype(float)
    attended = np.where(window > 0, np.minimum(keys, np.maximum(window, 1.0)), keys)
    key_heads = heads if encoder else columns["num_key_value_heads"].astype(float)
    narrow = np.zeros(len(keys)) if encoder else (columns["kv_cache_dtype"] == "fp8") * 1.0
    return attention_table(
        batch,
        heads,
        key_heads,
        np.ones(len(keys)) if generation else length,
        attended,
        size,
        causal=kind == "context_attention",
        key_bytes=2.0 - narrow,
        framework=_framework(columns),
        narrow=(columns["attn_dtype"] == "fp8") * 1.0,
        length=keys,
    )


def attention_table(
    batch: Array,
    heads: Array,
    key_heads: Array,
    queries: Array,
    keys: Array,
    size: Array,
    *,
    causal: bool,
    key_bytes: Any,
    framework: Any = 0.0,
    narrow: Any = 0.0,
    length: Array | None = None,
) -> OpTable:
    """Return a table of attention, each query seeing at most ``keys`` of the ``length`` keys that there are."""
    whole = keys if length is None else length
    pairs = queries * keys
    if causal:  # the first queries see fewer
        pairs = np.where(keys < whole, queries * keys - keys * (keys - 1) / 2, queries * (queries + 1) / 2)
    return make_table(
        "attention",
        len(batch),
        **{"b": batch * heads, "m": queries, "n": np.maximum(1.0, pairs / queries), "k": size},
        flops=4.0 * batch * heads * size * pairs,
        read_bytes=2.0 * batch * heads * queries * size
        + 2.0 * key_bytes * batch * key_heads * keys_read(keys, queries, whole) * size,
        written_bytes=2.0 * batch * heads * queries * size,
        elements=batch * heads * queries * size,
        width=key_bytes,
        extra=key_heads / heads,
        causal=float(causal),
        kernel=narrow,
        stride=framework,
    )


def keys_read(keys: Array, queries: Array, length: Array) -> Array:
    """Return how many keys are read: all that some query sees."""
    return np.where(queries > 1, length, keys)
