"""Finds the batch dimension of a model's inputs, and binds every free dimension to a size.

The batch is told by the names of dimensions. Missing sizes of others (sequence lengths, image sizes) are assumed, so
that any model can be read and tried; `list_free_dims` tells dimensions with a usual size, whose assumption deserves a
remark, from dimensions with a mere guess.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from onnx import TensorProto, TensorShapeProto, ValueInfoProto

from gpuprof.domain.model import Tensor
from gpuprof.errors import InputError
from gpuprof.graph.element_types import dtype_name
from gpuprof.graph.file import MOST_ELEMENTS

# "n" and "bs" only as separate words, "batch" anywhere, as in "batch_size".
_BATCH = re.compile(r"(^|[^a-z])(bs|n)([^a-z]|$)|batch", re.IGNORECASE)
_NOT_BATCH = re.compile(r"seq|len|time|height|width|past|token|channel", re.IGNORECASE)
_LENGTH = re.compile(r"seq|len|token", re.IGNORECASE)
#: Most channels of an image (red, green, blue, alpha), in its second or last dimension.
_MOST_COLOURS = 4
#: A dimension: its size, its name, or None for a free dimension without a name.
Dim = int | str | None
#: Default sizes of free dimensions: tokens of a sequence, pixels of a side, colours.
DEFAULT_DIM, DEFAULT_SIDE, DEFAULT_CHANNELS = 128, 224, 3
#: Sequence lengths to try where a model refuses the default, such as CLIP's text of at most 77 tokens, or a model fixed
#: to the length of the exporter's example.
SHORTER_DIMS = tuple(DEFAULT_DIM >> halvings for halvings in range(1, 5))
#: Size to try for dimensions of unknown meaning where a model refuses the default: a second of sound.
LONGER_DIM = 16_000

#: Numbered names by exporters: torch.export's s20 and u0, torch.onnx's x_dynamic_axes_1, tf2onnx's unk__7.
COUNTED = re.compile(r"[su]\d+|unk__\d+|.*dynamic_axes_\d+|[Dd]im_?\d+")

#: Least pixels per side of an image: smaller dimensions may be features.
_LEAST_SIDE = 16

_SIDE_OF_SOUND = re.compile(r"frame|time|mel|sample|audio", re.IGNORECASE)
_TOKENS = re.compile(r"seq|len|past|token", re.IGNORECASE)
#: Element types of token ids.
_WHOLE = frozenset({TensorProto.INT64, TensorProto.INT32})
#: Names of inputs with cached keys and values of earlier tokens.
_CACHE = re.compile(r"past|cache|(^|[^a-z])(key|value|kv)s?([^a-z]|$)", re.IGNORECASE)
_TOTAL, _PAST = re.compile("total", re.IGNORECASE), re.compile("past", re.IGNORECASE)


def is_batch(name: str) -> bool:
    """Return whether a dimension is named like a batch."""
    return _BATCH.search(name) is not None


def batch_axes(inputs: Mapping[str, tuple[Dim, ...]]) -> dict[str, int]:
    """Return the position of the free batch dimension of each input that has such a dimension.

    The batch is a dimension named like a batch at any position, or a ``B`` common to all inputs; else the first
    dimension, if free and not named like a sequence or a side. Where another input names its batch, the first dimension
    must also be followed by images or sequences, as in ``[images, 3, 224, 224]`` with ``[batch, sequence]``. Other
    inputs, and models with a fixed batch, are absent.
    """
    axes = {
        name: axis
        for name, dims in inputs.items()
        for axis, dim in reversed(list(enumerate(dims)))
        if isinstance(dim, str) and dim.isidentifier() and is_batch(dim)
    }
    axes = axes or _find_letter_b(inputs)
    has_named = bool(axes)
    for name, dims in inputs.items():
        first = dims[0] if dims else 0
        open_first = isinstance(first, str) and not _NOT_BATCH.search(first)
        if name not in axes and (first is None or (open_first and (not has_named or _holds_items(dims)))):
            axes[name] = 0
    return axes


def _find_letter_b(inputs: Mapping[str, tuple[Dim, ...]]) -> dict[str, int]:
    """Return the position of ``B`` in each input; empty where an input lacks a ``B``, or has an ``A``, too."""
    shapes = {name: [str(dim).upper() for dim in dims] for name, dims in inputs.items() if dims}
    if not shapes or any("B" not in dims or "A" in dims for dims in shapes.values()):
        return {}
    return {name: dims.index("B") for name, dims in shapes.items()}


def _holds_items(dims: tuple[Dim, ...]) -> bool:
    """Return whether images or sequences follow the first dimension."""
    if len(dims) == 4:
        colours = (dims[1], dims[-1])
        return any(isinstance(size, int) and size <= _MOST_COLOURS for size in colours) or "chann" in str(dims[1])
    return len(dims) == 2 and isinstance(dims[1], str) and _LENGTH.search(dims[1]) is not None


@dataclass(frozen=True, slots=True)
class FreeDim:
    """A free dimension of a model other than the batch."""

    name: str  #: Name for giving a size: the dimension's own, or ``"input:axis"``.
    source: str  #: The first input with this dimension.
    axis: int  #: Position in ``source``.
    #: Whether such a dimension has a usual size: tokens of a text, sides and channels of an image.
    is_usual: bool


def list_free_dims(infos: Iterable[ValueInfoProto]) -> tuple[FreeDim, ...]:
    """Return the free dimensions of a model's inputs, without the batch and sums of other dimensions."""
    infos = list(infos)
    declared = {info.name: declared_dims(info) or () for info in infos if info.type.HasField("tensor_type")}
    kinds = {info.name: dtype_name(info.type.tensor_type.elem_type) for info in infos if info.name in declared}
    axes = batch_axes(declared)
    batch = {declared[name][axis] for name, axis in axes.items()}
    by_name: dict[str, FreeDim] = {}
    for name, dims in declared.items():
        for axis, dim in enumerate(dims):
            if isinstance(dim, int) or axes.get(name) == axis or (dim is not None and dim in batch):
                continue
            key = f"{name}:{axis}" if dim is None else dim
            usual = _is_usual(name, dim, axis, dims, kinds[name])
            if key not in by_name or (usual and not by_name[key].is_usual):
                by_name[key] = FreeDim(key, name, axis, usual)
    names = set(by_name) | {dim for dim in batch if isinstance(dim, str)}
    totals = _list_totals(declared)
    return tuple(d for d in by_name.values() if d.name not in totals and not _is_sum_of_dims(d.name, names))


def _is_usual(name: str, dim: str | None, axis: int, shape: tuple[Dim, ...], dtype: str) -> bool:
    is_float = dtype.startswith(("float", "bfloat", "double"))
    if _is_unbatched_image(shape) or _is_cache(name, shape):
        return True
    if len(shape) >= 4:
        if dim is not None and _TOKENS.search(dim):
            return True
        looks_like_sound = any(isinstance(side, str) and _SIDE_OF_SOUND.search(side) for side in shape)
        # Latents of diffusion and flow models are not images: a decoder's output has eight times their side.
        is_latent = shape[1] in (2, 4) and not (isinstance(shape[-1], int) and shape[-1] <= 4)
        return not looks_like_sound and not is_latent and _default(name, dim, axis, shape) != DEFAULT_DIM
    if not is_float:
        return len(shape) == 2 or (dim is not None and _TOKENS.search(dim) is not None)
    # Floats in two dimensions are sound or a table, whatever the second dimension's name.
    return len(shape) > 2 and dim is not None and _TOKENS.search(dim) is not None


def _is_cache(name: str, shape: tuple[Dim, ...]) -> bool:
    """Return whether an input is a key-value cache of shape [batch, heads, tokens, head size]."""
    return len(shape) == 4 and isinstance(shape[3], int) and _CACHE.search(name) is not None


def _find_past_dim(declared: Mapping[str, tuple[Dim, ...]]) -> str | None:
    """Return the dimension of earlier tokens: by its name, or the third dimension of a key-value cache."""
    names = [dim for dims in declared.values() for dim in dims if isinstance(dim, str) and dim.isidentifier()]
    caches = [dims[2] for name, dims in declared.items() if _is_cache(name, dims)]
    return next(
        (dim for dim in (*names, *caches) if isinstance(dim, str) and (_PAST.search(dim) or dim in caches)), None
    )


def _list_totals(declared: Mapping[str, tuple[Dim, ...]]) -> tuple[str, ...]:
    """Return the dimensions of past plus new tokens: named as totals, or numbered and only in a mask."""
    past = _find_past_dim(declared)
    if past is None:
        return ()
    inputs = {dim for name, dims in declared.items() if "mask" not in name for dim in dims}
    last = (dims[-1] for name, dims in declared.items() if "mask" in name and len(dims) > 1 and dims[-1] not in inputs)
    numbered = (dim for dim in last if isinstance(dim, str) and COUNTED.fullmatch(dim))
    by_name = (dim for dims in declared.values() for dim in dims if isinstance(dim, str) and _TOTAL.search(dim))
    totals = (dim for dim in (*by_name, *numbered) if dim.isidentifier() and dim != past and not _PAST.search(dim))
    return tuple(dict.fromkeys(totals))


def _is_sum_of_dims(name: str, names: set[str]) -> bool:
    """Return whether a dimension is an expression of other dimensions: ``past + sequence``."""
    sizes = {dim: 2 for dim in names if dim.isidentifier()}
    return not name.isidentifier() and ":" not in name and _evaluate(name, sizes) is not None


def declared_dims(info: ValueInfoProto) -> tuple[Dim, ...] | None:
    """Return the declared dimensions of a value, None where even their number is undeclared.

    Negative sizes, written by some exporters, are free dimensions.
    """
    kind = info.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else _name_of(dim) for dim in kind.shape.dim
    )


def _name_of(dim: TensorShapeProto.Dimension) -> str | None:
    """Return the name of a dimension; None without a name, or with invalid text as in a damaged file."""
    return dim.dim_param if isinstance(dim.dim_param, str) and dim.dim_param else None


def fixed_batch(infos: Iterable[ValueInfoProto]) -> int | None:
    """Return the fixed batch of a model's inputs, None where the batch is free; 1 where no input has a dimension.

    Inputs of several dimensions take precedence over inputs of a single dimension, such as a time step. Single images,
    ``[3, height, width]`` as for torchvision's detectors, have no batch and are ignored.
    """
    declared = {info.name: declared_dims(info) or () for info in infos}
    if batch_axes(declared):
        return None
    return _first_fixed(declared) or 1


def _first_fixed(declared: Mapping[str, tuple[Dim, ...]]) -> int | None:
    fixed = [dims for dims in declared.values() if dims and isinstance(dims[0], int) and not _is_unbatched_image(dims)]
    dims = next((dims for dims in fixed if len(dims) > 1), next(iter(fixed), ()))
    return next((dim for dim in dims[:1] if isinstance(dim, int)), None)


def _is_unbatched_image(dims: tuple[Dim, ...]) -> bool:
    """Return whether dimensions are of a single image without a batch: three channels, then two sides."""
    return len(dims) == 3 and dims[0] == DEFAULT_CHANNELS and all(map(_is_image_side, dims[1:]))


def _is_image_side(dim: Dim) -> bool:
    if isinstance(dim, int):
        return dim >= _LEAST_SIDE
    return dim is None or not (_TOKENS.search(dim) or _SIDE_OF_SOUND.search(dim))


def bind_inputs(
    infos: Iterable[ValueInfoProto], batch: int, dims: Mapping[str, int], model: str
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the inputs with every dimension bound, and the size of each named dimension.

    Raises `InputError` if an input is not a tensor or has no shape, the batch is fixed at another size, or ``dims`` has
    an unknown name. ``infos``: the model's inputs, without weights; ``dims``: sizes by the dimension's name, or by
    ``"input:axis"`` for unnamed dimensions; ``model``: name of the model in errors.
    """
    infos = list(infos)
    declared = {info.name: _dims_of(info, model) for info in infos}
    axes = batch_axes(declared)
    _check_batch(declared, axes, batch, model)
    names = {str(declared[name][axis]): batch for name, axis in axes.items() if isinstance(declared[name][axis], str)}
    _check_known(dims, declared, names, model)
    # After the batch's names, for which `_check_known` refuses sizes.
    names |= dims
    # Before any arithmetic: "past + sequence" may occur before the input that names both.
    _bind_names(declared, names)
    tensors = {}
    for info in infos:
        name = info.name
        sizes = [
            batch if axes.get(name) == axis else _size(dim, axis, declared[name], name, names)
            for axis, dim in enumerate(declared[name])
        ]
        names |= {dim: size for dim, size in zip(declared[name], sizes, strict=True) if isinstance(dim, str)}
        tensors[name] = Tensor(name, dtype_name(info.type.tensor_type.elem_type), tuple(sizes))
        if tensors[name].elements > MOST_ELEMENTS:
            raise InputError(
                f"{model}: input {name} of shape {sizes} has more than {MOST_ELEMENTS:,} elements",
                "export it with the sizes that are sent, or give those of free dimensions with --dim",
            )
    return tensors, names


def sequence_dims(infos: Iterable[ValueInfoProto]) -> tuple[str, ...]:
    """Return the names of the free dimensions of a model's inputs that are sequence lengths, without sums."""
    infos = list(infos)
    free = {dim.name for dim in list_free_dims(infos)}
    names = [(dim, info.type.tensor_type.elem_type in _WHOLE) for info in infos for dim in declared_dims(info) or ()]
    return tuple(
        dict.fromkeys(
            dim
            for dim, is_whole in names
            if isinstance(dim, str) and dim.isidentifier() and dim in free and (is_whole or _TOKENS.search(dim))
        )
    )


def past_dims(infos: Iterable[ValueInfoProto]) -> set[str]:
    """Return the names of the dimensions of earlier tokens; empty for models without a cache."""
    declared = {info.name: declared_dims(info) or () for info in infos}
    caches = {dims[2] for name, dims in declared.items() if _is_cache(name, dims)}
    return {dim for dim in (*caches, _find_past_dim(declared)) if isinstance(dim, str)}


def _bind_names(declared: Mapping[str, tuple[Dim, ...]], names: dict[str, int]) -> None:
    """Bind dimensions with plain names before any expression, because expressions use these names.

    The total length of a decoder with a key-value cache is the past length plus the new tokens.
    """
    free = {
        dim: (name, axis, dims)
        for name, dims in reversed(list(declared.items()))
        for axis, dim in enumerate(dims)
        if isinstance(dim, str) and dim.isidentifier() and dim not in names
    }
    for dim, (name, axis, dims) in free.items():
        names[dim] = _default(name, dim, axis, dims)
    totals = [dim for dim in _list_totals(declared) if dim in free]
    past = _find_past_dim(declared)
    if totals and past is not None:
        new = (dims[1] for name, dims in declared.items() if "mask" not in name and len(dims) in (2, 3))
        names |= dict.fromkeys(totals, names[past] + next((_size_of(dim, names) for dim in new), 1))


def _size_of(dim: Dim, names: Mapping[str, int]) -> int:
    return dim if isinstance(dim, int) else names.get(dim or "", DEFAULT_DIM)


def bound_dims(declared: tuple[Dim, ...], names: Mapping[str, int]) -> tuple[int | None, ...]:
    """Return ``declared`` with names replaced by their bound sizes; None where unknown."""
    return tuple(_evaluate(dim, names) if isinstance(dim, str) else dim for dim in declared)


def _dims_of(info: ValueInfoProto, model: str) -> tuple[Dim, ...]:
    if not info.type.HasField("tensor_type"):
        kind = info.type.WhichOneof("value") or "value without a type"
        raise InputError(
            f"{model}: input {info.name} is of kind {kind.removesuffix('_type')}, not a tensor",
            "export the model with tensors as inputs: the Open Inference Protocol carries nothing else",
        )
    dims = declared_dims(info)
    if dims is None:
        raise InputError(
            f"{model}: input {info.name} declares no shape, so that nobody knows what may be sent to it",
            "export the model with its inputs' shapes; dimensions may be free",
        )
    return dims


def _check_batch(declared: Mapping[str, tuple[Dim, ...]], axes: Mapping[str, int], batch: int, model: str) -> None:
    if batch < 1:
        raise InputError(f"the batch must be at least 1 but is {batch}")
    if axes:
        return
    fixed = _first_fixed(declared)
    if fixed is None and batch != 1:
        raise InputError(f"{model}: no input has a batch dimension, but batch {batch} is asked", "ask for batch 1")
    if fixed is not None and fixed != batch:
        name = next(
            name for name, dims in declared.items() if dims and dims[0] == fixed and not _is_unbatched_image(dims)
        )
        ask = f"ask for batch {fixed}, or " if fixed else ""
        raise InputError(
            f"{model}: input {name} fixes the batch at {fixed}, but {batch} is asked",
            f"{ask}make it dynamic with: gpuprof zoo rebatch MODEL --batch dynamic -o FILE",
        )


def _check_known(
    dims: Mapping[str, int], declared: Mapping[str, tuple[Dim, ...]], batch: Mapping[str, int], model: str
) -> None:
    free = {dim for shape in declared.values() for dim in shape if isinstance(dim, str)} - set(batch)
    free |= {f"{name}:{axis}" for name, shape in declared.items() for axis, dim in enumerate(shape) if dim is None}
    for name, size in dims.items():
        if name not in free:
            raise InputError(f"{model} has no free dimension {name!r}", f"it has: {', '.join(sorted(free)) or 'none'}")
        if size < 1:
            raise InputError(f"dimension {name} must be at least 1 but is {size}")


def _size(dim: Dim, axis: int, shape: tuple[Dim, ...], name: str, names: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    bound = names.get(f"{name}:{axis}") if dim is None else _evaluate(dim, names)
    return _default(name, dim, axis, shape) if bound is None else bound


def _default(name: str, dim: str | None, axis: int, shape: tuple[Dim, ...]) -> int:
    if _is_unbatched_image(shape):
        return DEFAULT_SIDE
    if len(shape) < 4 or _is_cache(name, shape) or (dim is not None and _TOKENS.search(dim)):
        return DEFAULT_DIM
    # An image's channels are the last dimension if that is fixed to a small number, else the second.
    colours_last = isinstance(shape[-1], int) and shape[-1] <= 4
    # A free height with a fixed width is rare in images, but usual in spectra and caches of few heads.
    is_picture = shape[1] in (1, 3, None) or not (axis == 2 and isinstance(shape[3], int))
    if isinstance(shape[1], int) and (shape[1] > 4 or not is_picture) and not colours_last:
        return DEFAULT_DIM  # a tensor of heads or features, such as a key cache
    return DEFAULT_CHANNELS if axis == 1 and not colours_last else DEFAULT_SIDE


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}


def _evaluate(text: str, names: Mapping[str, int]) -> int | None:
    """Return the value of a dimension such as ``past + sequence``, None where a term is unknown."""
    if text in names:
        return names[text]
    try:
        # Parsed, never evaluated: the text comes from an untrusted file.
        return _value(ast.parse(text, mode="eval").body, names)
    except (SyntaxError, ValueError, KeyError, RecursionError, ZeroDivisionError, MemoryError):
        return None


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    raise ValueError("not arithmetic of names and numbers")
