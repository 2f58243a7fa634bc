"""Generates valid model inputs: with the right shape and type, and with indices within the model's tables."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import NodeProto
from onnx.helper import tensor_dtype_to_np_dtype

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.graph.element_types import elem_type
from gpuprof.graph.file import read_onnx

Array = npt.NDArray[np.generic]

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
#: Words of texts for models without a vocabulary, and the number of words per text.
_UNKNOWN_TEXTS = ("alpha", "beta", "gamma", "delta")
_WORDS = 8
#: Attribute with the vocabulary of each op.
_TEXTS = {
    "OneHotEncoder": "cats_strings",
    "LabelEncoder": "keys_strings",
    "CategoryMapper": "cats_strings",
    "DictVectorizer": "string_vocabulary",
    "TfIdfVectorizer": "pool_strings",
}
#: Ops that split texts into words.
_OF_WORDS = {"TfIdfVectorizer"}


def random_inputs(graph: ModelGraph, seed: int = 0) -> dict[str, Array]:
    """Return an array for each input of ``graph``, deterministic for a given seed.

    Floats are standard normal; integers are below the sizes of their look-up tables; masks are all ones; positions
    count up; sequence lengths are full. Texts come from the model's vocabulary.

    Returns
    -------
    dict of str to ndarray
        Arrays with the inputs' shapes and types.
    """
    limits = _index_limits(graph)
    has_texts = any(tensor.dtype == "string" for tensor in graph.inputs)
    texts_by_input = _read_known_texts(Path(graph.path)) if has_texts and Path(graph.path).is_file() else {}
    return {
        tensor.name: _random_texts(tensor, texts_by_input.get(tensor.name), seed)
        if tensor.dtype == "string"
        else _random_array(tensor, limits.get(tensor.name), seed)
        for tensor in graph.inputs
    }


def _random_texts(tensor: Tensor, vocabulary: _KnownTexts | None, seed: int) -> Array:
    """Return texts from the model's vocabulary, of several words if the model splits texts into words."""
    random = _generator(tensor, seed)
    choices = vocabulary.texts if vocabulary else _UNKNOWN_TEXTS
    words = _WORDS if vocabulary is None or vocabulary.are_words else 1
    texts = [" ".join(random.choice(choices, words)) for _ in range(tensor.elements)]
    return np.array(texts, dtype=object).reshape(tensor.shape)


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


@dataclass(frozen=True, slots=True)
class _KnownTexts:
    """Vocabulary of the ops behind an input."""

    texts: tuple[str, ...]
    are_words: bool  #: Whether the entries are words of longer texts, not whole values.


def _read_known_texts(path: Path) -> dict[str, _KnownTexts]:
    """Return, for each input, the vocabulary of the first op with a vocabulary behind it; absent without such an op.

    Raises `InputError` if the file is not ONNX or damaged.
    """
    file = read_onnx(path)
    sources = {info.name: {info.name} for info in file.inputs}
    texts: dict[str, _KnownTexts] = {}
    for node in file.model.graph.node:
        behind = set().union(*(sources.get(name, set()) for name in node.input))
        if vocabulary := _texts_of(node):
            texts = dict.fromkeys(behind, vocabulary) | texts
        for name in node.output:
            sources[name] = behind
    return texts


def _texts_of(node: NodeProto) -> _KnownTexts | None:
    name = _TEXTS.get(node.op_type)
    raw = next((attribute.strings for attribute in node.attribute if attribute.name == name), ())
    texts = tuple(text.decode(errors="replace") for text in raw)
    return _KnownTexts(texts, node.op_type in _OF_WORDS) if texts else None
