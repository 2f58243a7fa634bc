"""Runs models on a GPU through ONNX Runtime, in the same way for `gpuprof profile` and `gpuprof serve`.

A batch is gathered in pinned memory, copied to persistent device tensors, run as a CUDA graph, and its outputs are
copied back through pinned memory. Convolutions run in channels-last layout, with biases fused. Which of these options
work depends on the model, the GPU and the build of ONNX Runtime, so `open_on_gpu` tries them on the model itself: an
option is kept if its answers equal those of a plain session. The reason against each refused option is kept, too.

ONNX Runtime keeps a CUDA graph for each id, thread and session, so that a `GpuSession` must be run in a single thread;
only `GpuSession.stage` may be called in another. Sources: ONNX Runtime's documentation of the CUDA provider (options,
CUDA graphs) and of I/O binding.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpuprof.domain.runtime_variant import GRAPHS, SESSIONS, Padding
from gpuprof.errors import InputError, UnavailableError, runtime_errors, shorten_message
from gpuprof.graph.file import list_op_types
from gpuprof.rules.batching import needs_padding, padded_size
from gpuprof.runtime.outputs import outputs_differ
from gpuprof.runtime.providers import GPU_OPTIONS, ORT_CUDA, ORT_TENSORRT
from gpuprof.runtime.session import open_session, translate_error

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Feeds = Mapping[str, "Array"]
_Shapes = tuple[tuple[str, tuple[int, ...], str], ...]

#: A partial batch right after one of another size may take this many times as long as after one of its own.
_OWN_TIME_FACTOR = 1.5
#: Channels last is refused where a full batch takes longer than this many times the plain session's: on GPUs whose
#: matrix units do not run the type. Beyond what neighbours disturb while they are loaded.
_SLOWER_FACTOR = 1.25
_TIMED_RUNS = 5
#: Runs before a CUDA graph is replayed: ONNX Runtime captures it at the second or third.
_CAPTURE_RUNS = 3
#: Shapes bound, and captured in graphs, in the order in which they first come; requests may have any length.
_MOST_SHAPES = 256
_CUDART = re.compile(r"/\S*libcudart[^/\s]*\.so\S*")
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind
#: Key of the choice in a run's settings.
GPU_CHOICE = "gpu_choice"
_NUMPY_TYPES = frozenset(
    f"tensor({name})"
    for name in (
        "bool",
        "double",
        "float",
        "float16",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
)


class GpuChoice(StrEnum):
    """Values of ``GPUPROF_GPU_OPTIONS``: which session options are tried."""

    AUTO = "auto"  #: All options that work.
    PLAIN = "plain"  #: None of them.
    TENSORRT = "tensorrt"  #: TensorRT's provider where it starts, else as ``auto``.


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options of the sessions of a model on a GPU, beyond those of every session."""

    tensorrt: bool = False  #: TensorRT's provider before CUDA's.
    channels_last: bool = False  #: Convolutions in channels-last layout, with biases fused.
    pinned: bool = False  #: Pinned staging buffers and device tensors that stay.
    graphs: bool = False  #: A CUDA graph for each batch size.
    sessions: bool = False  #: A session for each batch size.
    padding: Padding = Padding.NONE

    @property
    def execution(self) -> str:
        """The value of `gpuprof.domain.runtime_variant.RuntimeVariant.execution`."""
        names = {"tensorrt": self.tensorrt, "channels-last": self.channels_last, "pinned": self.pinned}
        names |= {GRAPHS: self.graphs, SESSIONS: self.sessions}
        return "+".join(["fused", *(name for name, is_used in names.items() if is_used)])

    @property
    def provider(self) -> str:
        """ONNX Runtime's provider."""
        return ORT_TENSORRT if self.tensorrt else ORT_CUDA

    def provider_options(self) -> dict[str, str]:
        """Return the options of the provider, as ONNX Runtime names them."""
        if self.tensorrt:
            return {"trt_engine_cache_enable": "0"}
        # Without channels last a fused bias costs a memset of the output, and cannot be captured in a graph.
        options = {"prefer_nhwc": "1", "fuse_conv_bias": "1"} if self.channels_last else {}
        return options | ({"enable_cuda_graph": "1"} if self.graphs else {})

    def without_graphs(self) -> GpuOptions:
        """Return the options for a recording that ties kernels to nodes: a replayed graph is a single launch."""
        return replace(self, graphs=False)


class HostMemory(Protocol):
    """Staging memory on the host, and copies between it and the device."""

    def allocate(self, size: int) -> Array:
        """Return ``size`` bytes of memory that is released with the array."""

    def copy(self, target: int, source: int, size: int, kind: int) -> None:
        """Copy ``size`` bytes between addresses; ``kind`` as in CUDA's ``cudaMemcpyKind``."""


class PinnedMemory:
    """Page-locked memory by CUDA's runtime: the library that ONNX Runtime itself has loaded.

    Raises `UnavailableError` when no such library is loaded.
    """

    def __init__(self) -> None:
        match = _CUDART.search(Path("/proc/self/maps").read_text(errors="replace"))
        if match is None:
            raise UnavailableError("CUDA's runtime, libcudart, is not loaded as a library of its own")
        self._library = ctypes.CDLL(match[0])

    def allocate(self, size: int) -> Array:
        """Return pinned memory."""
        import numpy as np

        address = ctypes.c_void_p()
        self._check(self._library.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(max(size, 1)), 0))
        assert address.value is not None
        buffer: Any = (ctypes.c_uint8 * max(size, 1)).from_address(address.value)
        weakref.finalize(buffer, self._library.cudaFreeHost, address)  # arrays keep the buffer alive
        array: Array = np.frombuffer(buffer, np.uint8)[:size]
        return array

    def copy(self, target: int, source: int, size: int, kind: int) -> None:
        """Copy, and wait for the end of the copy."""
        pointers = ctypes.c_void_p(target), ctypes.c_void_p(source)
        self._check(self._library.cudaMemcpy(*pointers, ctypes.c_size_t(size), kind))

    def _check(self, code: int) -> None:
        if code:
            raise UnavailableError(f"CUDA's runtime reports error {code}", "is the GPU's memory, or the host's, full?")


@dataclass(slots=True)
class StagedBatch:
    """A batch in host memory, ready for `GpuSession.run_staged`."""

    feeds: Feeds  #: Padded arrays, in pinned memory if staged there.
    rows: int | None  #: Number of requested rows of a padded batch; None: all.


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A device tensor at a fixed address, and its staging memory."""

    address: int
    host: Array


@dataclass(frozen=True, slots=True)
class _BoundBatch:
    """A session bound to device tensors for batches of certain shapes."""

    session: Any
    binding: Any
    run_options: Any
    inputs: Mapping[str, int]  #: Addresses.
    outputs: Mapping[str, _Tensor]


class GpuSession:
    """A model that is open on a GPU with certain options.

    ``batch``: largest number of rows of a batch; None: the model has no batch, and is never padded. ``device``: ONNX
    Runtime's name of the device. Raises `InputError` or `UnavailableError` as `open_session`.
    """

    def __init__(
        self,
        path: Path,
        options: GpuOptions,
        batch: int | None,
        *,
        threads: int,
        memory: HostMemory | None = None,
        device: str = "cuda",
    ) -> None:
        self.options = options
        self.remarks: tuple[str, ...] = ()  #: Reasons against refused options.
        self._path, self._batch, self._threads, self._device = path, batch, threads, device
        self._memory = memory if options.pinned else None
        self._sessions: dict[object, Any] = {}
        session = self._session(batch)
        self._input_names = [tensor.name for tensor in session.get_inputs()]
        self.output_names = list(dict.fromkeys(tensor.name for tensor in session.get_outputs()))
        self._bound: dict[_Shapes, _BoundBatch | None] = {}
        #: By input or output: bytes and device tensor, shared by all sizes; the last is the largest.
        self._device_memory: dict[str, list[tuple[int, Any]]] = {}
        self._staging: dict[object, Array] = {}
        self._turn = 0

    def stage(self, feeds: Feeds) -> StagedBatch:
        """Return a batch padded to a size that the session runs, in pinned memory if its shapes are known.

        The padding copies the last row: unlike zeros, such values are valid inputs of the model. At most one batch may
        be staged while another one runs.
        """
        import numpy as np

        rows = None
        if self._batch is not None and self.options.padding is not Padding.NONE:
            given = min(len(array) for array in feeds.values())
            size = padded_size(given, self._batch, self.options.padding) if 0 < given < self._batch else given
            if size > given:
                rows = given
                feeds = {
                    name: np.concatenate([array, np.repeat(array[-1:], size - given, axis=0)])
                    for name, array in feeds.items()
                }
        if self._memory is None or self._bound.get(_shapes(feeds)) is None:
            return StagedBatch(feeds, rows)
        self._turn ^= 1  # the other buffer may belong to the running batch
        staged = {}
        for name, array in feeds.items():
            staged[name] = self._staging_array((name, self._turn), array)
            np.copyto(staged[name], array)
        return StagedBatch(staged, rows)

    def run_staged(self, batch: StagedBatch, names: Sequence[str]) -> list[Array]:
        """Run a batch and return the outputs ``names``, valid until the next batch is run."""
        import numpy as np

        key = _shapes(batch.feeds)
        bound = self._bound.get(key)
        if bound is None:
            outputs = self._run_unbound(batch.feeds)
            if self._memory is not None and key not in self._bound and len(self._bound) < _MOST_SHAPES:
                self._bound[key] = self._bind(batch.feeds, outputs)
            results = [outputs[name] for name in names]
        else:
            assert self._memory is not None
            for name, address in bound.inputs.items():
                array = np.ascontiguousarray(batch.feeds[name])
                self._memory.copy(address, array.ctypes.data, array.nbytes, _TO_DEVICE)
            bound.session.run_with_iobinding(bound.binding, bound.run_options)
            tensors = [bound.outputs[name] for name in names]
            for tensor in tensors:
                self._memory.copy(tensor.host.ctypes.data, tensor.address, tensor.host.nbytes, _TO_HOST)
            results = [tensor.host for tensor in tensors]
        # Outputs without a row for each item are checked by the caller.
        return results if batch.rows is None else [array[: batch.rows] if array.ndim else array for array in results]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Stage and run a batch; return all outputs, valid until the next batch is run.

        Raises `InputError` when the runtime refuses the inputs.
        """
        try:
            outputs = self.run_staged(self.stage(feeds), self.output_names)
        except runtime_errors() as error:
            raise translate_error(error, self._path) from error
        return dict(zip(self.output_names, outputs, strict=True))

    def _session(self, rows: int | None) -> Any:
        key = rows if self.options.sessions else None
        if key not in self._sessions:
            self._sessions[key] = open_session(
                self._path,
                threads=self._threads,
                provider=self.options.provider,
                provider_options=self.options.provider_options(),
            )
        return self._sessions[key]

    def _session_of(self, feeds: Feeds) -> Any:
        return self._session(None if self._batch is None else min(len(array) for array in feeds.values()))

    def _run_unbound(self, feeds: Feeds) -> dict[str, Array]:
        """Run without persistent device tensors and without a graph."""
        import numpy as np
        import onnxruntime as ort

        session = self._session_of(feeds)
        binding = session.io_binding()
        for name in self._input_names:
            array = np.ascontiguousarray(feeds[name])
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, self._device, 0))
        for name in self.output_names:
            binding.bind_output(name, self._device)
        session.run_with_iobinding(binding, self._run_options(graph=-1))
        return dict(zip(self.output_names, binding.copy_outputs_to_cpu(), strict=True))

    def _bind(self, feeds: Feeds, outputs: Feeds) -> _BoundBatch | None:
        """Bind device tensors for batches with these shapes, and capture a graph; None: they cannot be bound."""
        import numpy as np

        assert self._memory is not None
        if any(array.size == 0 for array in (*feeds.values(), *outputs.values())):
            return None
        session = self._session_of(feeds)
        binding = session.io_binding()
        addresses: dict[str, int] = {}
        for name in self._input_names:
            array = np.ascontiguousarray(feeds[name])
            addresses[name] = self._device_address(name, array)
            binding.bind_input(name, self._device, 0, array.dtype, array.shape, addresses[name])
            self._memory.copy(addresses[name], array.ctypes.data, array.nbytes, _TO_DEVICE)
        tensors: dict[str, _Tensor] = {}
        for name, array in outputs.items():
            address = self._device_address(name, array)
            binding.bind_output(name, self._device, 0, array.dtype, array.shape, address)
            tensors[name] = _Tensor(address, self._staging_array(name, array))
        run_options = self._run_options(graph=len(self._bound) + 1)
        for _ in range(_CAPTURE_RUNS if self.options.graphs else 1):
            session.run_with_iobinding(binding, run_options)
        return _BoundBatch(session, binding, run_options, addresses, tensors)

    def _run_options(self, graph: int) -> Any:
        """Return options that select a CUDA graph; -1: none."""
        import onnxruntime as ort

        options = ort.RunOptions()
        if self.options.graphs:
            options.add_run_config_entry("gpu_graph_id", str(graph))
        return options

    def _device_address(self, name: str, array: Array) -> int:
        import onnxruntime as ort

        held = self._device_memory.setdefault(name, [])  # smaller ones stay: graphs hold their addresses
        if not held or held[-1][0] < array.nbytes:
            value = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype, self._device, 0)
            held.append((array.nbytes, value))
        return int(held[-1][1].data_ptr())

    def _staging_array(self, key: object, like: Array) -> Array:
        """Return staging memory with the type and shape of an array; the same memory for equal keys."""
        assert self._memory is not None
        if key not in self._staging or len(self._staging[key]) < like.nbytes:
            self._staging[key] = self._memory.allocate(like.nbytes)  # arrays keep a smaller one alive
        array: Array = self._staging[key][: like.nbytes].view(like.dtype).reshape(like.shape)
        return array


def rows_of(feeds: Feeds) -> int | None:
    """Return the first dimension of all inputs, their batch; None if they differ."""
    sizes = {array.shape[:1] for array in feeds.values()}
    return next(iter(sizes))[0] if len(sizes) == 1 and sizes != {()} else None


def _shapes(feeds: Feeds) -> _Shapes:
    return tuple(sorted((name, array.shape, array.dtype.str) for name, array in feeds.items()))


def is_bindable(session: Any) -> bool:
    """Return whether all inputs and outputs are tensors of types that NumPy has, so that they can be bound."""
    return all(tensor.type in _NUMPY_TYPES for tensor in (*session.get_inputs(), *session.get_outputs()))


def list_candidates(op_types: frozenset[str], batch: int | None, choice: GpuChoice) -> Iterator[GpuOptions]:
    """Yield options worth trying, the best first; none for plain sessions.

    ``batch``: as for `GpuSession`; models with batches of at most 1 are not padded.
    """
    if choice is GpuChoice.PLAIN:
        return
    has_plans = needs_padding(op_types)
    whole = Padding.FULL if has_plans and batch is not None and batch > 1 else Padding.NONE
    sizes = Padding.POWERS_OF_TWO if whole is Padding.FULL else Padding.NONE
    if choice is GpuChoice.TENSORRT:
        # An engine for each range of shapes: with full batches alone there is a single range.
        yield GpuOptions(tensorrt=True, pinned=True, padding=Padding.NONE if batch is None else Padding.FULL)
    for channels_last, mode in product((True, False) if has_plans else (False,), (GRAPHS, SESSIONS, "")):
        if mode != SESSIONS or sizes is Padding.POWERS_OF_TWO:
            yield GpuOptions(
                channels_last=channels_last,
                pinned=True,
                graphs=mode == GRAPHS,
                sessions=mode == SESSIONS,
                padding=sizes if mode else whole,
            )


def open_on_gpu(
    path: Path,
    feeds: Feeds,
    batch: int | None,
    *,
    threads: int,
    memory: HostMemory | None = None,
    device: str = "cuda",
) -> GpuSession:
    """Open a model with the first options that give correct outputs on this machine.

    The result's ``remarks`` name the refused options, and why. Raises `InputError` or `UnavailableError` when the
    model does not run in a plain session.

    Parameters
    ----------
    path : Path
        An ONNX file whose inputs and outputs are bindable (`is_bindable`).
    feeds : mapping of str to array
        A full batch of inputs.
    batch : int or None
        Rows of a full batch; None: the model has no batch of independent items.
    threads : int
        As for `open_session`.
    memory : HostMemory, optional
        Default: pinned memory.
    device : str
        ONNX Runtime's name of the device.
    """
    errors: tuple[type[Exception], ...] = (*runtime_errors(), UnavailableError)
    trial = _Trial(GpuSession(path, GpuOptions(), batch, threads=threads, device=device), feeds, batch)
    remarks: list[str] = []
    for options in list_candidates(list_op_types(path), batch, read_choice()):
        session = None  # the memory of the refused session
        try:
            memory = memory or PinnedMemory()
            session = GpuSession(path, options, batch, threads=threads, memory=memory, device=device)
            reason = trial.find_fault(session)
        except errors as error:
            reason = shorten_message(error)
        if session is not None and reason is None:
            session.remarks = tuple(remarks)
            return session
        remarks.append(f"not {options.execution}: {reason}")
    plain = open_plainly(path, batch, threads=threads, device=device)
    plain.remarks = tuple(remarks)
    return plain


def open_plainly(path: Path, batch: int | None, *, threads: int, device: str = "cuda") -> GpuSession:
    """Open a model without options; parameters and errors as for `open_on_gpu`."""
    has_plans = batch is not None and batch > 1 and needs_padding(list_op_types(path))
    options = GpuOptions(padding=Padding.FULL if has_plans else Padding.NONE)
    return GpuSession(path, options, batch, threads=threads, device=device)


def read_choice() -> GpuChoice:
    """Return the value of the environment variable; raises `InputError` for another value."""
    text = os.environ.get(GPU_OPTIONS) or GpuChoice.AUTO
    try:
        return GpuChoice(text)
    except ValueError:
        raise InputError(f"{GPU_OPTIONS} is {text!r}", f"set it to {', '.join(GpuChoice)}") from None


class _Trial:
    """Outputs and time of a plain session, with which other sessions are compared."""

    def __init__(self, plain: GpuSession, feeds: Feeds, batch: int | None) -> None:
        self._feeds = [feeds, {name: _reverse(array) for name, array in feeds.items()}]
        self._batch = batch
        self._expected = [plain.run(feeds) for feeds in self._feeds]
        self._differs = outputs_differ(self._expected[0], plain.run(feeds), "in a second run")
        self._best_s = self._time(plain, batch)

    def find_fault(self, session: GpuSession) -> str | None:
        """Return the reason to refuse a session; None if its outputs are right and it is not slower."""
        if self._differs:
            return self._differs
        sizes = self._list_sizes(session.options.padding)
        for size in sizes:
            session.run(self._part(self._feeds[0], size))  # binds the size, and captures its graph
        # After all sizes: a graph must stay right once the plans of its convolutions have been replaced.
        for size, feeds, expected in (
            (size, *pair) for size in sizes for pair in zip(self._feeds, self._expected, strict=True)
        ):
            wanted, answers = self._part(expected, size), session.run(self._part(feeds, size))
            outputs = {name: answers[name] for name in wanted}
            if fault := outputs_differ(wanted, outputs, f"at batch {size or 1}"):
                return fault
        if session.options.padding is Padding.POWERS_OF_TWO:
            own_s = self._time(session, sizes[-1])
            after_s = self._time(session, sizes[-1], before=sizes[0])
            if after_s > _OWN_TIME_FACTOR * own_s:
                return (
                    f"a batch of {sizes[-1]} after a batch of {sizes[0]} takes {after_s * 1e3:.3g} ms, "
                    f"after its own size {own_s * 1e3:.3g} ms"
                )
        if not session.options.channels_last:
            return None
        best_s = self._time(session, sizes[0])
        is_slower = best_s > _SLOWER_FACTOR * self._best_s
        return f"a full batch takes {best_s * 1e3:.3g} ms, plainly {self._best_s * 1e3:.3g} ms" if is_slower else None

    def _list_sizes(self, padding: Padding) -> Sequence[int | None]:
        """Return the sizes to try, largest first; without padding only the largest, since no plans depend on shapes."""
        if self._batch is None or padding is Padding.NONE:
            return [self._batch]
        rows = range(1, self._batch + 1)
        return sorted({padded_size(number, self._batch, padding) for number in rows}, reverse=True)

    def _part(self, arrays: Feeds, rows: int | None) -> dict[str, Array]:
        """Return the first rows; for smaller batches without outputs that lack a row for each item."""
        if rows is None or rows == self._batch:
            return dict(arrays)
        return {name: array[:rows] for name, array in arrays.items() if array.ndim and len(array) == self._batch}

    def _time(self, session: GpuSession, rows: int | None, before: int | None = None) -> float:
        """Return the least time in seconds of a batch of ``rows``, each run after a batch of ``before``."""
        feeds = self._part(self._feeds[0], rows)
        times = []
        for _ in range(_TIMED_RUNS):
            if before is not None:
                session.run(self._part(self._feeds[0], before))
            begin = time.perf_counter()
            session.run(feeds)
            times.append(time.perf_counter() - begin)
        return min(times)


def _reverse(array: Array) -> Array:
    """Return different inputs with the same values, which are therefore valid for the model."""
    return array[..., ::-1].copy() if array.ndim else array
