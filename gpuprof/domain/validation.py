"""Checks of arguments and settings by pydantic, whose errors become an `InputError` with the rule and the value."""

from __future__ import annotations

import functools
import inspect
import re
import reprlib
from collections.abc import Callable, Sequence
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
