"""Collection of values given by name, as in ``--rate MODEL=20``, each name once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from gpuprof.errors import InputError

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
