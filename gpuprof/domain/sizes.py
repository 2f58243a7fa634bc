"""Sizes of a model's free dimensions: options of users, the kernel database's form, and sized names.

A workload is a model, a batch and the sizes of its other free dimensions. ``"bert[seq=64]"`` is the model ``bert`` with
size 64 of its dimension ``seq``; such a sized name is valid wherever a model's name is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Integral

from gpuprof.errors import InputError

#: Sizes by the dimension's name (``"input:axis"`` for an unnamed dimension), sorted.
Sizes = tuple[tuple[str, int], ...]

LARGEST_SIZE = 2**31 - 1
_MOST_COMBINATIONS = 1000
_SIZED = re.compile(r"(?P<model>.+)\[(?P<sizes>[^\[\]]*=[^\[\]]*)\]")


@dataclass(frozen=True, slots=True)
class SizeMix:
    """A distribution of requests over sizes."""

    parts: tuple[tuple[Sizes, float], ...]  #: Sizes and their fraction of the requests; the fractions add up to 1.

    def __str__(self) -> str:
        if len(self.parts) == 1:
            return describe_sizes(self.parts[0][0])
        return "|".join(f"{describe_sizes(sizes)}:{part:g}" for sizes, part in self.parts)


def describe_sizes(sizes: Iterable[tuple[str, int]]) -> str:
    """Return ``"height=224,width=224"``, the input of `parse_sizes`."""
    return ",".join(f"{name}={size}" for name, size in sorted(sizes))


def parse_sizes(text: str) -> Sizes:
    """Parse ``"height=224,width=224"``, also with semicolons; an empty text has no sizes.

    Raises `InputError` when a part is not NAME=SIZE, a size is not an integer from 1 to 2³¹-1, or a name is repeated.

    Examples
    --------
    >>> parse_sizes("height=224,width=192")
    (('height', 224), ('width', 192))
    """
    sizes: dict[str, int] = {}
    for word in filter(None, (word.strip() for word in re.split("[,;]", text))):
        name, size = _parse_size(word, text)
        if name in sizes:
            raise InputError(f"{text!r} gives {name!r} two sizes", "write each dimension once: NAME=SIZE,OTHER=SIZE")
        sizes[name] = size
    return tuple(sorted(sizes.items()))


def parse_dims(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Parse ``("seq=64,256", "height=224")``: the sizes of each dimension.

    Raises `InputError` when a text is not NAME=SIZE[,SIZE...], a size is not a positive integer, or a name is repeated.

    Examples
    --------
    >>> parse_dims(["seq=64,256", "height=224"])
    {'seq': (64, 256), 'height': (224,)}
    """
    values: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, separator, values_text = text.rpartition("=")
        name = name.strip()
        if not separator or not name:
            raise InputError(f"cannot read the dimension {text!r}", "write NAME=SIZE, or NAME=SIZE,SIZE for several")
        if name in values:
            raise InputError(f"the dimension {name!r} is given twice", f"write {name}=SIZE,SIZE")
        values[name] = tuple(dict.fromkeys(_parse_size(f"{name}={word}", text)[1] for word in values_text.split(",")))
    return values


def single_sizes(dims: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the single size of each dimension. Raises `InputError` when a dimension has several sizes.

    Examples
    --------
    >>> single_sizes({"seq": [64], "height": [224]})
    {'seq': 64, 'height': 224}
    """
    for name, sizes in dims.items():
        if len(sizes) != 1:
            fix = f"slo.csv's column dims takes a distribution: {name}={'|'.join(f'{size}:PART' for size in sizes)}"
            raise InputError(f"the dimension {name!r} has several sizes where one is needed", fix)
    return {name: sizes[0] for name, sizes in dims.items()}


def combine_sizes(dims: Mapping[str, int | Iterable[int]]) -> tuple[Sizes, ...]:
    """Return every combination of sizes; without dimensions, the empty combination.

    Raises `InputError` when there are too many combinations, or a size is not a positive integer.

    Examples
    --------
    >>> combine_sizes({"seq": (64, 256), "height": 224})
    ((('height', 224), ('seq', 64)), (('height', 224), ('seq', 256)))
    """
    values = {name: _list_sizes(name, sizes) for name, sizes in dims.items()}
    combinations = math.prod(len(sizes) for sizes in values.values())
    if combinations > _MOST_COMBINATIONS:
        raise InputError(f"{combinations} combinations of sizes are asked for", f"at most {_MOST_COMBINATIONS}")
    return tuple(tuple(sorted(zip(values, combination, strict=True))) for combination in product(*values.values()))


def _list_sizes(name: str, values: int | Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of a dimension, given as an integer or as an iterable."""
    sizes = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else (values,)
    if not sizes:
        raise InputError(f"the dimension {name!r} has no size", f"give one or several: {{{name!r}: (64, 256)}}")
    return tuple(check_size(name, size) for size in sizes)


def check_size(name: str, size: object) -> int:
    """Return the size as an ``int``. Raises `InputError` unless ``size`` is an integer from 1 to 2³¹-1."""
    number = int(size) if isinstance(size, Integral) and not isinstance(size, bool) else 0
    if not 1 <= number <= LARGEST_SIZE:
        raise InputError(f"the size of {name!r} must be a whole number from 1 to {LARGEST_SIZE:,} but got {size!r}")
    return number


def parse_mix(text: str) -> SizeMix:
    """Parse ``"seq=128"``, or a distribution ``"seq=64:0.7|seq=256:0.3"``, where a single name need not be repeated.

    Parts are normalised to a sum of 1. Raises `InputError` when sizes or parts cannot be parsed, a part is not
    positive, or sizes are repeated.

    Examples
    --------
    >>> parse_mix("seq=64:7|256:3").parts
    (((('seq', 64),), 0.7), ((('seq', 256),), 0.3))
    """
    parts: dict[Sizes, float] = {}
    first = ""
    choices = text.split("|")
    for choice in choices:
        body, part = _split_part(choice.strip(), text, len(choices) > 1)
        if "=" not in body and first:
            body = f"{first}={body}"
        sizes = parse_sizes(body)
        if not sizes:
            raise InputError(f"cannot read the sizes {text!r}", "write NAME=SIZE, or NAME=SIZE:PART|NAME=SIZE:PART")
        if parts and {name for name, _ in sizes} != {name for name, _ in next(iter(parts))}:
            raise InputError(f"{text!r} does not size the same dimensions everywhere", "name them in each part")
        if sizes in parts:
            raise InputError(f"{text!r} has {describe_sizes(sizes)} twice", "add the parts up")
        first = sizes[0][0] if len(sizes) == 1 else ""
        parts[sizes] = part
    total = sum(parts.values())
    return SizeMix(tuple((sizes, part / total) for sizes, part in parts.items()))


def sized_name(model: str, sizes: Iterable[tuple[str, int]]) -> str:
    """Return ``"bert[seq=64]"``; the model's name alone without sizes.

    Examples
    --------
    >>> sized_name("bert", (("seq", 64),))
    'bert[seq=64]'
    """
    text = describe_sizes(sizes)
    return f"{model}[{text}]" if text else model


def split_name(name: str) -> tuple[str, Sizes]:
    """Return the model and the sizes of a name by `sized_name`; the whole name without sizes where parsing fails.

    Examples
    --------
    >>> split_name("bert[seq=64]")
    ('bert', (('seq', 64),))
    >>> split_name("bert")
    ('bert', ())
    """
    match = _SIZED.fullmatch(name)
    if match is None:
        return name, ()
    try:
        return match["model"], parse_sizes(match["sizes"])
    except InputError:
        return name, ()


def mixed_name(model: str, dims: str | None) -> str:
    """Return the model's name followed by its sizes or their distribution: ``"bert[seq=64:0.7|seq=256:0.3]"``."""
    return model if dims is None else f"{model}[{parse_mix(dims)}]"


def name_parts(name: str) -> tuple[tuple[str, float], ...]:
    """Return each model with sizes in a `mixed_name`, and its fraction of the requests.

    Examples
    --------
    >>> name_parts("bert[seq=64:0.75|seq=256:0.25]")
    (('bert[seq=64]', 0.75), ('bert[seq=256]', 0.25))
    """
    match = _SIZED.fullmatch(name)
    if match is None or "|" not in match["sizes"]:
        return ((name, 1.0),)
    try:
        mix = parse_mix(match["sizes"])
    except InputError:
        return ((name, 1.0),)
    return tuple((sized_name(match["model"], sizes), part) for sizes, part in mix.parts)


def interpolate_sizes(measured: Iterable[Sizes], target: Sizes) -> dict[Sizes, float] | None:
    """Return weights of measured sizes for multilinear interpolation at ``target``; None outside the measured range.

    The weight is 1 for ``target`` itself, else linear in each dimension between the nearest sizes on either side. Sizes
    of other dimensions than those of ``target`` are ignored.

    Examples
    --------
    >>> interpolate_sizes([(("seq", 64),), (("seq", 256),)], (("seq", 160),))
    {(('seq', 64),): 0.5, (('seq', 256),): 0.5}
    """
    names = [name for name, _ in target]
    points = {sizes for sizes in measured if [name for name, _ in sizes] == names}
    weights = _interpolate_weights(
        {tuple(size for _, size in sizes): sizes for sizes in points}, [size for _, size in target]
    )
    return weights or None


def _interpolate_weights(points: Mapping[tuple[int, ...], Sizes], target: Sequence[int]) -> dict[Sizes, float]:
    if not target:
        return dict.fromkeys(points.values(), 1.0)
    groups: dict[int, dict[tuple[int, ...], Sizes]] = {}
    for key, sizes in points.items():
        groups.setdefault(key[0], {})[key[1:]] = sizes
    # Recursion over dimensions, the last first: measured sizes need not form a full grid, only bracket ``target``.
    by_size = {size: _interpolate_weights(group, target[1:]) for size, group in groups.items()}
    bracketing = {size: blended for size, blended in by_size.items() if blended}
    if target[0] in bracketing:
        return bracketing[target[0]]
    below = max((size for size in bracketing if size < target[0]), default=None)
    above = min((size for size in bracketing if size > target[0]), default=None)
    if below is None or above is None:
        return {}
    weight = (target[0] - below) / (above - below)
    blended = {sizes: (1.0 - weight) * part for sizes, part in bracketing[below].items()}
    for sizes, part in bracketing[above].items():
        blended[sizes] = blended.get(sizes, 0.0) + weight * part
    return blended


def _parse_size(word: str, text: str) -> tuple[str, int]:
    name, separator, size = word.rpartition("=")
    if not separator or not name.strip():
        raise InputError(f"cannot read the sizes {text!r}", "write NAME=SIZE, such as seq=128")
    digits = size.strip()
    if not digits.isdecimal() or len(digits) > len(str(LARGEST_SIZE)) or not 1 <= int(digits) <= LARGEST_SIZE:
        size_text = digits if len(digits) < 40 else f"one of {len(digits)} characters"
        raise InputError(
            f"the size of {name.strip()!r} must be a whole number from 1 to {LARGEST_SIZE:,} but got {size_text!r}"
        )
    return name.strip(), int(size)


def _split_part(choice: str, text: str, several: bool) -> tuple[str, float]:
    """Return the sizes of a choice and its fraction; an axis after a colon, as in ``x:1=64``, is not a fraction."""
    body, separator, part = choice.rpartition(":")
    if not separator or "=" in part:
        if several:
            raise InputError(f"{text!r} does not say how many requests have {choice}", "write seq=64:0.7|seq=256:0.3")
        return choice, 1.0
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0.0:
        raise InputError(f"the part of the requests with {body} must be a positive number but got {part!r}")
    return body, value


def require_dimensions(names: Iterable[str], free_by_model: Iterable[Collection[str]]) -> None:
    """Raise `InputError`, listing the existing dimensions, for a dimension missing from all models.

    ``free_by_model``: free dimensions of each model, without the batch.
    """
    free = {name for dimensions in free_by_model for name in dimensions}
    for name in names:
        if name not in free:
            free_text = ", ".join(sorted(free)) or "none"
            raise InputError(
                f"no model has a free dimension {name!r}",
                f"they have, beside the batch, which --batch sets or place chooses: {free_text}",
            )
