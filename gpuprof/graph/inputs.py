"""Inputs of models: valid random arrays, and data of files.

Random arrays have the right shape and type, and indices within the model's tables. Files are .npz archives, or JSON in
the format of perf_analyzer's ``--input-data``. A sample is the data of a request: an array for each input, with batch
size 1 where the input has a batch dimension.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto
from onnx.helper import tensor_dtype_to_np_dtype

from gpuprof.domain.file_access import refuse_pipe
from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.domain.plural import count_of
from gpuprof.domain.sizes import Sizes
from gpuprof.errors import InputError
from gpuprof.graph.dims import Dim, batch_axes, declared_dims, list_free_dims
from gpuprof.graph.element_types import dtype_name, elem_type
from gpuprof.graph.file import read_onnx

Array = npt.NDArray[Any]
Sample = Mapping[str, Array]
#: Ops whose outputs hold values of their inputs, moved or cast.
_CARRIERS = {
    "Cast", "CastLike", "Clip", "Concat", "Expand", "Flatten", "Identity", "Max", "Min", "Pad", "Reshape", "Slice",
    "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
_SHIFTERS = {"Add", "Sub"}
_LOOKUPS = {"Gather": 1, "GatherElements": 1, "EmbedLayerNormalization": 0}
_RECURRENT = {"LSTM", "GRU", "RNN"}
#: Upper bound of indices and flags without a look-up table: 0 and 1 are always valid.
_UNBOUNDED = 2
#: Texts for models without a vocabulary.
_UNKNOWN_TEXTS = ("alpha beta", "gamma delta")
#: Attribute with the vocabulary of each op.
_TEXTS = {
    "OneHotEncoder": "cats_strings",
    "LabelEncoder": "keys_strings",
    "CategoryMapper": "cats_strings",
    "DictVectorizer": "string_vocabulary",
    "TfIdfVectorizer": "pool_strings",
}


@dataclass(frozen=True, slots=True)
class InputShape:
    """Name, type and shape of a model's input."""

    #: ``name``, ``dtype``: As in `gpuprof.domain.model.Tensor`.
    name: str
    dtype: str
    dims: tuple[Dim, ...]  #: Sizes; a name, or None, for free dimensions.
    batch_axis: int | None  #: Position of the batch in ``dims``.

    def check(self, array: Array, where: str) -> None:
        """Raise `InputError`, with the required shape, unless the array is valid in a request."""
        dims = [1 if axis == self.batch_axis else dim for axis, dim in enumerate(self.dims)]
        fits = len(dims) == array.ndim and all(
            not isinstance(dim, int) or dim == size for dim, size in zip(dims, array.shape, strict=True)
        )
        if not fits or 0 in array.shape:
            shape = ["?" if dim is None else dim for dim in dims]
            raise InputError(f"{where}: input {self.name} must have shape {shape} but has {list(array.shape)}")


@dataclass(frozen=True, slots=True)
class InputData:
    """Samples of a file."""

    path: Path
    sha256: str  #: Hash of the file.
    samples: tuple[Sample, ...]

    def __str__(self) -> str:
        return f"{self.path.name} ({count_of(len(self.samples), 'sample')}, sha256 {self.sha256[:12]})"


def model_inputs(path: Path) -> tuple[InputShape, ...]:
    """Return the inputs of the model in ``path``. Raises `InputError` if the file is not ONNX or damaged."""
    file = read_onnx(path)
    infos = file.inputs
    declared = {info.name: declared_dims(info) or () for info in infos if info.type.HasField("tensor_type")}
    axes = batch_axes(declared)
    return tuple(
        InputShape(info.name, dtype_name(info.type.tensor_type.elem_type), declared[info.name], axes.get(info.name))
        for info in infos
        if info.name in declared
    )


def read_input_data(path: Path, inputs: Sequence[InputShape]) -> InputData:
    """Read the samples of a file for a model with these inputs.

    ``.npz``: an array for each input, with samples along the batch dimension. JSON: ``{"data": [{"INPUT": [1, 2, …],
    "OTHER": {"content": […], "shape": […]}, "TEXT": {"b64": "…"}}, …]}``, with shapes without the batch. Raises
    `InputError` when the file cannot be read, lacks an input, has an unknown input, or an array of another shape or
    type.
    """
    try:
        content = refuse_pipe(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", "give an .npz or JSON file") from None
    # An .npz file is a zip archive with first bytes "PK", whatever its name.
    samples = _read_npz(path, inputs) if content[:2] == b"PK" else _read_json(content, path, inputs)
    if not samples:
        raise InputError(f"{path} holds no samples", "give at least one value for each input")
    return InputData(path, hashlib.sha256(content).hexdigest(), tuple(samples))


def sample_sizes(sample: Sample, path: Path) -> Sizes:
    """Return the sizes of the free dimensions of the model in ``path`` in a sample.

    Raises `InputError` when inputs have different sizes of the same dimension.
    """
    file = read_onnx(path)
    free = {dim.name for dim in list_free_dims(file.inputs)}
    sizes: dict[str, int] = {}
    for shape in model_inputs(path):
        for axis, dim in enumerate(shape.dims):
            name = f"{shape.name}:{axis}" if dim is None else str(dim)
            if name not in free:
                continue
            size = sample[shape.name].shape[axis]
            if sizes.setdefault(name, size) != size:
                raise InputError(
                    f"the samples give the dimension {name} the sizes {sizes[name]} and {size}",
                    "give samples of one size",
                )
    return tuple(sorted(sizes.items()))


def group_by_sizes(data: InputData, path: Path) -> dict[Sizes, tuple[Sample, ...]]:
    """Return the samples grouped by their sizes of the free dimensions of the model in ``path``, in file order.

    Raises `InputError` as `sample_sizes` does.
    """
    groups: dict[Sizes, list[Sample]] = {}
    for sample in data.samples:
        groups.setdefault(sample_sizes(sample, path), []).append(sample)
    return {sizes: tuple(samples) for sizes, samples in groups.items()}


def join_samples(samples: Sequence[Sample], batch: int, inputs: Sequence[InputShape]) -> dict[str, Array]:
    """Return a batch of samples of equal size, repeated cyclically if too few; unbatched inputs are the first's."""
    chosen = [samples[number % len(samples)] for number in range(batch)]
    return {
        tensor.name: chosen[0][tensor.name]
        if tensor.batch_axis is None
        else np.concatenate([sample[tensor.name] for sample in chosen], axis=tensor.batch_axis)
        for tensor in inputs
    }


def _read_npz(path: Path, inputs: Sequence[InputShape]) -> list[Sample]:
    try:
        # Unpickling would run code from the file.
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, KeyError) as error:
        why = "it holds objects, or is none" if "pickle" in str(error) else error  # numpy's advice is unsafe
        raise InputError(
            f"cannot read {path} as .npz: {why}", "write it with numpy.savez, texts as fixed width"
        ) from None
    _check_names(arrays, inputs, str(path))
    typed = {tensor.name: _cast_array(arrays[tensor.name], tensor, str(path)) for tensor in inputs}
    counts = {
        tensor.name: typed[tensor.name].shape[tensor.batch_axis]
        for tensor in inputs
        if tensor.batch_axis is not None and typed[tensor.name].ndim > tensor.batch_axis
    }
    if len(set(counts.values())) > 1:
        text = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise InputError(f"{path} does not hold as many samples of each input: {text}")
    samples: list[Sample] = []
    for number in range(next(iter(counts.values()), 1)):
        sample = {
            x.name: np.take(typed[x.name], [number], x.batch_axis) if x.name in counts else typed[x.name]
            for x in inputs
        }
        for tensor in inputs:
            tensor.check(sample[tensor.name], str(path))
        samples.append(sample)
    return samples


def _read_json(content: bytes, path: Path, inputs: Sequence[InputShape]) -> list[Sample]:
    def read_number(text: str) -> float:
        if np.isinf(value := float(text)):
            raise InputError(f"{path}: the number {text} is larger than any type holds", "write a smaller one")
        return value

    try:
        document = json.loads(content, parse_float=read_number)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is neither .npz nor JSON: {error}", "see perf_analyzer's --input-data") from None
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise InputError(f'{path} has no list "data"', 'write {"data": [{"INPUT": [1, 2]}]}')
    return [_read_sample(entry, f"{path}: data[{number}]", inputs) for number, entry in enumerate(entries)]


def _read_sample(entry: object, where: str, inputs: Sequence[InputShape]) -> Sample:
    if not isinstance(entry, dict):
        raise InputError(f"{where} must be an object with a value for each input but is {type(entry).__name__}")
    _check_names(entry, inputs, where)
    return {tensor.name: _decode_tensor(entry[tensor.name], tensor, where) for tensor in inputs}


def _decode_tensor(value: object, tensor: InputShape, where: str) -> Array:
    shape: Any = None
    content = value
    if isinstance(value, dict):
        shape, content = value.get("shape"), value.get("content", value)
    free = [dim for axis, dim in enumerate(tensor.dims) if axis != tensor.batch_axis]
    if shape is None and all(isinstance(dim, int) for dim in free):
        shape = free
    try:
        array = _decode_content(content, tensor, where)
        if shape is None and sum(not isinstance(dim, int) for dim in free) == 1:
            product = prod(dim for dim in free if isinstance(dim, int))
            shape = [dim if isinstance(dim, int) else array.size // max(1, product) for dim in free]
        if shape is None:
            raise InputError(
                f"{where}: input {tensor.name} has several free dimensions", 'give {"content": …, "shape": …}'
            )
        sizes = _read_shape(shape, tensor, where)
        if array.size != prod(sizes):
            raise InputError(
                f"{where}: input {tensor.name} takes {prod(sizes)} values but has size {array.size}",
                "give a value for each",
            )
        array = array.reshape(sizes)
    except (ValueError, TypeError, OverflowError) as error:
        what = "rows of different lengths" if "inhomogeneous" in str(error) else error
        raise InputError(
            f"{where}: input {tensor.name}: {what}", 'write its values in tensor list, or {"b64": …} of its bytes'
        ) from None
    if tensor.batch_axis is not None:
        array = np.expand_dims(array, tensor.batch_axis)
    tensor.check(array, where)
    return array


def _read_shape(shape: object, tensor: InputShape, where: str) -> list[int]:
    if not isinstance(shape, list) or any(type(size) is not int or size < 1 for size in shape):
        raise InputError(
            f"{where}: input {tensor.name} has the shape {json.dumps(shape)}", "give a list of whole numbers from 1"
        )
    return shape


def _decode_content(content: object, tensor: InputShape, where: str) -> Array:
    """Return the flattened values; base64 holds little-endian numbers, or the bytes of a single text."""
    if isinstance(content, dict):
        if not isinstance(content.get("b64"), str):
            raise InputError(f'{where}: input {tensor.name} has neither "content" nor "b64"')
        raw = base64.b64decode(content["b64"], validate=True)
        if tensor.dtype == "string":
            return np.array([raw.decode(errors="surrogateescape")], dtype=object)
        return np.frombuffer(raw, tensor_dtype_to_np_dtype(elem_type(tensor.dtype)))
    if tensor.dtype == "string":
        texts = [content] if isinstance(content, str) else np.asarray(content, dtype=object).ravel().tolist()
        return np.array([str(text) for text in texts], dtype=object)
    return _cast_array(np.asarray(content).ravel(), tensor, where)


def _cast_array(array: Array, tensor: InputShape, where: str) -> Array:
    """Return the array in the input's type. Raises `InputError` for numbers out of the type's range."""
    if tensor.dtype == "string":
        if array.dtype.kind not in "USO":
            raise InputError(f"{where}: input {tensor.name} takes texts but has {array.dtype}")
        return array.astype(str).astype(object)
    dtype = tensor_dtype_to_np_dtype(elem_type(tensor.dtype))
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf":
        content = "texts" if array.dtype.kind == "U" else "null or objects"
        raise InputError(f"{where}: input {tensor.name} takes {tensor.dtype} but has {content}", "give numbers")
    with np.errstate(all="ignore"):
        # Overflow is detected by the comparison below: NumPy does not warn in all cases.
        cast: Array = array.astype(dtype)
        # Infinity is valid, as in masks; a finite number that becomes infinite is out of range.
        is_lossy = (
            not np.array_equal(cast.astype(array.dtype), array)
            if np.dtype(dtype).kind in "biu"
            else bool(np.any(np.isinf(cast.astype(np.float64)) & np.isfinite(array)))
        )
    if is_lossy:
        raise InputError(
            f"{where}: input {tensor.name} has values that {tensor.dtype} cannot hold",
            "give numbers of the input's type",
        )
    return cast


def _check_names(values: Mapping[str, object], inputs: Sequence[InputShape], where: str) -> None:
    names = [tensor.name for tensor in inputs]
    if missing := [name for name in names if name not in values]:
        raise InputError(f"{where} lacks the input {missing[0]!r}", f"the model takes {', '.join(names)}")
    if unknown := [name for name in values if name not in names]:
        raise InputError(f"{where} has {unknown[0]!r}, which is no input", f"the model takes {', '.join(names)}")


def random_inputs(graph: ModelGraph, seed: int = 0) -> dict[str, Array]:
    """Return an array for each input of ``graph``, deterministic for a given seed.

    Floats are standard normal; integers are below the sizes of their look-up tables; masks are all ones; positions
    count up; sequence lengths are full. Texts come from the model's vocabulary.
    """
    limits = _index_limits(graph)
    has_texts = any(tensor.dtype == "string" for tensor in graph.inputs)
    texts_by_input = _read_known_texts(Path(graph.path)) if has_texts and Path(graph.path).is_file() else {}
    return {
        tensor.name: _random_texts(tensor, texts_by_input.get(tensor.name, _UNKNOWN_TEXTS), seed)
        if tensor.dtype == "string"
        else _random_array(tensor, limits.get(tensor.name), seed)
        for tensor in graph.inputs
    }


def _random_texts(tensor: Tensor, vocabulary: Sequence[str], seed: int) -> Array:
    return _generator(tensor, seed).choice(np.array(vocabulary, dtype=object), tensor.shape)


def _generator(tensor: Tensor, seed: int) -> np.random.Generator:
    # By a checksum of the name: Python's hash of strings differs between processes.
    return np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])


def _random_array(tensor: Tensor, limit: int | None, seed: int) -> Array:
    name = tensor.name.lower()
    random = _generator(tensor, seed)
    dtype = tensor_dtype_to_np_dtype(elem_type(tensor.dtype))
    # A mask that hides tokens would let a runtime skip work of real requests.
    if "mask" in name or tensor.dtype == "bool":
        return np.ones(tensor.shape, dtype)
    if not tensor.dtype.startswith(("int", "uint")):
        return random.standard_normal(tensor.shape, dtype=np.float32).astype(dtype)
    if "position" in name and tensor.shape:
        counting = np.arange(tensor.shape[-1]) % (limit or tensor.shape[-1] or 1)
        return np.broadcast_to(counting, tensor.shape).astype(dtype)
    if limit is None and tensor.dtype == "uint8" and len(tensor.shape) >= 3:
        limit = 256  # an image
    if limit is not None and limit < 0:  # a length, not an index
        return np.full(tensor.shape, -limit, dtype)
    return random.integers(0, limit or _UNBOUNDED, tensor.shape).astype(dtype)


def _index_limits(graph: ModelGraph) -> dict[str, int]:
    """Return the size of the smallest table indexed by each input; for inputs of lengths, the negative length."""
    limits: dict[str, int] = {}
    for op in reversed(graph.ops):  # a value's limit is final after all its consumers
        for name, limit in _limits_of(op, limits, graph):
            limits[name] = min(limit, limits.get(name, limit))
    return limits


def _limits_of(op: Op, limits: dict[str, int], graph: ModelGraph) -> list[tuple[str, int]]:
    if op.op_type in _LOOKUPS and len(op.inputs) > 1:
        position = _LOOKUPS[op.op_type]
        table = op.inputs[2] if op.op_type == "EmbedLayerNormalization" else op.inputs[0]
        axis = op.attributes.get("axis", 0)
        size = table.shape[axis if isinstance(axis, int) else 0] if table.shape else 0
        table_limit = [(op.inputs[position].name, size)] if size else []
        output_limit = [(op.inputs[0].name, limits[op.outputs[0].name])] if op.outputs[0].name in limits else []
        return table_limit + output_limit
    if op.op_type in _RECURRENT:
        steps = op.inputs[0].shape[0]
        lengths = [tensor for tensor in op.inputs[3:] if tensor.dtype == "int32" and len(tensor.shape) == 1]
        # Negative: the full length, not a limit (see `_random_array`).
        return [(tensor.name, -steps) for tensor in lengths]
    below = [limits[tensor.name] for tensor in op.outputs if tensor.name in limits]
    if not below or op.op_type not in _CARRIERS | _SHIFTERS:
        return []
    limit = min(below)
    if op.op_type in _SHIFTERS:
        # The summand before the look-up may be known, such as the offset of each feature in a table; an unknown summand
        # gets half the table.
        shift = _largest(op.weights, graph) if op.op_type == "Add" else None
        limit = max(1, limit // 2 if shift is None else limit - shift)
    return [(tensor.name, limit) for tensor in op.inputs if tensor not in op.weights]


def _largest(weights: tuple[Tensor, ...], graph: ModelGraph) -> int | None:
    """Return the largest value of a small integer weight, None where absent or unknown."""
    from gpuprof.graph.load import load_nodes

    if not weights or not Path(graph.path).is_file():
        return None
    value = load_nodes(Path(graph.path), graph.batch, dict(graph.sizes))[1].get(weights[0].name)
    return max(0, int(value.max())) if value is not None and value.size and value.dtype.kind in "iu" else None


def _read_known_texts(path: Path) -> dict[str, tuple[str, ...]]:
    """Return, for each input, the vocabulary of the first op with a vocabulary behind it; absent without such an op.

    Raises `InputError` if the file is not ONNX or damaged.
    """
    file = read_onnx(path)
    sources = {info.name: {info.name} for info in file.inputs}
    texts: dict[str, tuple[str, ...]] = {}
    for node in file.model.graph.node:
        behind = set().union(*(sources.get(name, set()) for name in node.input))
        if vocabulary := _texts_of(node):
            texts = dict.fromkeys(behind, vocabulary) | texts
        for name in node.output:
            sources[name] = behind
    return texts


def _texts_of(node: NodeProto) -> tuple[str, ...]:
    name = _TEXTS.get(node.op_type)
    raw = next((attribute.strings for attribute in node.attribute if attribute.name == name), ())
    return tuple(text.decode(errors="replace") for text in raw)
