"""Checks of arguments and settings by pydantic, whose errors become an `InputError` with the rule and the value.

Also durations in texts (``90``, ``250ms``, ``5m``, ``1d``), and values given by name, each name once.
"""

from __future__ import annotations

import functools
import inspect
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ParamSpec, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, ValidationError, validate_call

from gpuprof.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: Thirty years in seconds, whose nanoseconds fit an int64.
LARGEST = 1e9

Positive: TypeAlias = Annotated[float, Field(gt=0.0, le=LARGEST)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0.0, le=LARGEST)]
Fraction: TypeAlias = Annotated[float, Field(ge=0.0, le=1.0)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=int(LARGEST))]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Port: TypeAlias = Annotated[int, Field(ge=0, le=65535)]

#: Wording of pydantic's types.
_KINDS = {"int": "a whole number", "float": "a number", "bool": "True or False", "string": "a string", "path": "a path"}


class ArgumentError(InputError):
    """An argument of a wrong type or out of range: its name, and the rule with the value."""

    def __init__(self, owner: str, name: str, rule: str) -> None:
        super().__init__(f"{name} of {owner} {rule}")
        self.name, self.rule = name, rule


def describe_error(owner: str, error: ValidationError, names: Sequence[str] = ()) -> Exception:
    """Return the errors of the first wrong argument in gpuprof's wording; ``names``: of positional arguments."""
    # Absent arguments last: a wrong one is the likelier cause.
    first, *faults = sorted(error.errors(), key=lambda fault: fault["type"].startswith("missing"))
    argument = first["loc"][0]
    name = names[argument] if isinstance(argument, int) else str(argument)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return TypeError(f"{owner} got an unexpected keyword argument {name!r}")
    if first["type"].startswith("missing") or first["type"] == "unexpected_positional_argument":
        return TypeError(f"{owner}: {first['msg'].lower()}: {name}")
    alternatives = [
        first,
        *(fault for fault in faults if fault["loc"][0] == argument and fault["input"] is first["input"]),
    ]
    rules = " or ".join(dict.fromkeys(map(_describe_rule, alternatives))).replace(" or be ", " or ")
    return ArgumentError(owner, name, f"must {rules} but got {' '.join(reprlib.repr(first['input']).split())}")


def _describe_rule(error: Any) -> str:
    if kind := _KINDS.get(error["type"].partition("_")[0]):
        return f"be {kind}"
    if kind := error.get("ctx", {}).get("class_name") or error.get("ctx", {}).get("class"):
        return f"be {'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
    return re.sub(r"^(Value error, )?((Input|Value) should|must) ", "", error["msg"])


def check_arguments(function: Callable[P, R], owner: str = "") -> Callable[P, R]:
    """Return a function that checks and converts its arguments by their annotations.

    The function raises an `InputError` for the first argument of a wrong type. ``owner``: its name in messages.
    """
    owner, names = owner or f"gpuprof.{function.__name__}", list(inspect.signature(function).parameters)
    checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=True))(function)

    @functools.wraps(function)
    def call_checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return checked(*args, **kwargs)
        except ValidationError as error:
            if error.title not in (function.__name__, function.__qualname__):
                raise
            raise describe_error(owner, error, names) from None

    return call_checked


def check_fields(cls: type[T]) -> type[T]:
    """Return a dataclass whose constructor checks its arguments as `check_arguments` does, before ``__post_init__``."""
    cls.__init__ = check_arguments(cls.__init__, cls.__name__)  # type: ignore[method-assign]
    return cls


_FORM = re.compile(r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*(?P<unit>ms|s|m|min|h|d)?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, what: str = "a duration", *, takes_zero: bool = False, unit: str = "s") -> float:
    """Return the duration written in ``text``, in ``unit``; a number alone is in that unit.

    Raises `InputError` when the text has another form, or the duration is zero, unless ``takes_zero``, or longer than
    30 years.

    Examples
    --------
    >>> parse_duration("250ms"), parse_duration("5m"), parse_duration("90")
    (0.25, 300.0, 90.0)
    >>> parse_duration("0.7", unit="ms"), parse_duration("2s", unit="ms")
    (0.7, 2000.0)
    """
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        raise InputError(f"cannot read {what} from {text!r}", f"write a number and ms, s, m, h or d, as in 60{unit}")
    number, of_text = float(match["number"]), _SECONDS[match["unit"] or unit]
    seconds = number * of_text
    if (seconds == 0.0 and not takes_zero) or not seconds <= LARGEST:
        raise InputError(f"{what} must be above 0 and at most 30 years but got {text}")
    return number * (of_text / _SECONDS[unit])


Value = TypeVar("Value")


def collect_distinct(what: str, pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Return the values by name; ``what`` describes them in errors.

    Raises `InputError` when a name occurs twice, since the intended value is ambiguous.
    """
    values: dict[str, Value] = {}
    for name, value in pairs:
        if name in values:
            first, second = (f"{item:g}" if isinstance(item, float) else str(item) for item in (values[name], value))
            raise InputError(
                f"{what} of {name or 'all models'} is given twice: {first} and {second}", "leave one of them out"
            )
        values[name] = value
    return values
