"""Checks that arguments of public functions and settings have their annotated types."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from gpuprof.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_SCALARS = {int: "a whole number", float: "a number", str: "a string", bool: "True or False", NoneType: "None"}


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, in an annotation: ``Annotated[int, Range(1)]``."""

    low: float
    high: float = 1e9  #: Upper bound; in seconds thirty years, within the nanoseconds of an int64.
    is_open: bool = False  #: True where ``low`` itself is excluded.

    def holds(self, number: float) -> bool:
        """Return whether a number lies within."""
        return self.low <= number <= self.high and not (self.is_open and number == self.low)

    def __str__(self) -> str:
        return f"{'above' if self.is_open else 'from'} {self.low:g} to {self.high:,.15g}"


Positive: TypeAlias = Annotated[float, Range(0.0, is_open=True)]
NotNegative: TypeAlias = Annotated[float, Range(0.0)]
Fraction: TypeAlias = Annotated[float, Range(0.0, 1.0)]
Count: TypeAlias = Annotated[int, Range(1)]
Seed: TypeAlias = Annotated[int, Range(0, 2**63 - 1)]
Port: TypeAlias = Annotated[int, Range(0, 65535)]


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with its arguments checked: an `InputError` names the first argument of a wrong type.

    Arguments are converted to the annotated type: numpy numbers to Python numbers, strings to paths, iterables to
    sequences.
    """
    names = list(inspect.signature(function).parameters)
    hints = functools.cache(lambda: get_type_hints(inspect.unwrap(function), include_extras=True))

    @functools.wraps(function)
    def call_checked(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*_conform_all(f"gpuprof.{function.__name__}", hints(), names, args, kwargs), **kwargs)

    return call_checked


def check_fields(cls: type[T]) -> type[T]:
    """Return a dataclass whose constructor checks its arguments as `check_arguments` does, before ``__post_init__``."""
    init, names = cls.__init__, list(inspect.signature(cls).parameters)
    hints = functools.cache(lambda: get_type_hints(cls, include_extras=True))

    @functools.wraps(init)
    def init_checked(self: T, *args: Any, **kwargs: Any) -> None:
        init(self, *_conform_all(cls.__name__, hints(), names, args, kwargs), **kwargs)

    cls.__init__ = init_checked  # type: ignore[assignment]
    return cls


def _conform_all(
    owner: str, hints: Mapping[str, Any], names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> Sequence[Any]:
    """Return ``args`` converted to their hints and convert ``kwargs`` in place; arguments without a parameter stay."""
    given = [_conform(owner, name, value, hints[name]) for name, value in zip(names, args, strict=False)]
    for name, value in kwargs.items():
        if name in hints:
            kwargs[name] = _conform(owner, name, value, hints[name])
    return (*given, *args[len(names) :])


def _conform(owner: str, name: str, value: Any, hint: Any) -> Any:
    if type(value) in _plain_types(hint) and ("\0" not in value if isinstance(value, str) else value == value):
        return value  # the common case; NaN differs from itself
    try:
        return _convert(value, hint)
    except TypeError:
        said = " ".join(reprlib.repr(value).split())
        wanted = (
            "without a null byte" if isinstance(value, str | os.PathLike) and "\0" in str(value) else _describe(hint)
        )
        raise InputError(f"{name} of {owner} must be {wanted} but got {said}") from None


@functools.cache
def _plain_types(hint: Any) -> frozenset[type]:
    """Return the types whose values satisfy ``hint`` without conversion, except NaN and strings with a null byte."""
    if get_origin(hint) in (Union, UnionType):
        return frozenset().union(*map(_plain_types, get_args(hint)))
    return frozenset({hint} if hint in _SCALARS or hint is Path else ())


def _convert(value: Any, hint: Any) -> Any:
    """Return ``value`` converted to ``hint``. Raises `TypeError` when the conversion is not possible."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if hint in _SCALARS:
        return _convert_scalar(value, hint)
    if origin is Annotated:
        number = _convert_scalar(value, args[0])
        if not args[1].holds(number):
            raise TypeError
        return number
    if origin in (Union, UnionType):
        return _convert_to_one(value, args)
    if origin is Literal:
        fits = value in args
    elif origin is Path:
        return Path(_convert_to_one(value, (str, os.PathLike)))
    elif origin in (Sequence, tuple):
        return _convert_sequence(value, args[0])
    elif origin is Mapping:
        return _convert_mapping(value, *args)
    elif origin is Callable:
        fits = callable(value)
    elif getattr(origin, "_is_protocol", False):
        wanted = [name for name in vars(origin) if not name.startswith("_")]
        fits = not isinstance(value, type) and all(hasattr(value, name) for name in wanted)
    elif origin is os.PathLike:
        fits = isinstance(value, os.PathLike) and "\0" not in str(value)
    else:
        fits = isinstance(value, origin)
    if not fits:
        raise TypeError
    return value


def _convert_scalar(value: Any, kind: type) -> Any:
    is_bool = isinstance(value, bool) or type(value).__name__ == "bool"  # numpy's bool is not derived from Python's
    if kind is bool and is_bool:
        return bool(value)
    if kind is int and isinstance(value, numbers.Integral) and not is_bool:
        return int(value)
    if kind is float and isinstance(value, numbers.Real) and not is_bool:
        try:
            number = float(value)
        except OverflowError:
            raise TypeError from None
        if not math.isnan(number):
            return value if isinstance(value, int) else number
    elif (kind is str and isinstance(value, str) and "\0" not in value) or (kind is NoneType and value is None):
        return value
    raise TypeError


def _convert_to_one(value: Any, hints: Sequence[Any]) -> Any:
    for hint in hints:
        try:
            return _convert(value, hint)
        except TypeError:
            continue
    raise TypeError


def _convert_sequence(value: Any, hint: Any) -> Any:
    if not isinstance(value, Iterable) or isinstance(value, Mapping | bytes | bytearray):
        raise TypeError
    given = value if isinstance(value, Sequence) else tuple(value)
    if isinstance(given, str):
        _convert(given, hint)  # a single string is a sequence of strings
        return given
    found = tuple(_convert(one, hint) for one in given)
    return given if all(map(_is_same, found, given)) else found


def _convert_mapping(value: Any, key_hint: Any, value_hint: Any) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError
    found = {_convert(key, key_hint): _convert(one, value_hint) for key, one in value.items()}
    return value if all(map(_is_same, found.values(), value.values())) else found


def _is_same(one: Any, other: Any) -> bool:
    return one is other


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Annotated:
        return f"{_SCALARS[args[0]]} {args[1]}"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_describe, args)))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in (Sequence, tuple):
        return f"a sequence, each {_describe(args[0])}"
    if origin is Mapping:
        return f"a mapping from {_describe(args[0])} to {_describe(args[1])}"
    if origin in (Path, os.PathLike):
        return "a path"
    return "callable" if origin is Callable else f"{'an' if origin.__name__[0] in 'AEIOU' else 'a'} {origin.__name__}"
