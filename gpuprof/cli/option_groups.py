"""Options of a verb in groups: a dataclass for each, which the verb takes in place of a dozen parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from typer.models import ParameterInfo

Settings = TypeVar("Settings")


def with_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """Return ``verb`` as typer is to see it: with the fields of its dataclasses as options of its own.

    ``verb``: parameters whose type is a dataclass are groups: each field, annotated as a parameter of a typer function
    and with a default, becomes an option, in the help under what the dataclass says of itself. Others stay as they are.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if name in groups:
            parameters += _options(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(verb)
    def flat(**given: Any) -> None:
        grouped = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        verb(**given, **grouped)

    # typer reads the signature and the annotations, which `wraps` has taken from the verb.
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def fill_settings(kind: type[Settings], *groups: object, **others: Any) -> Settings:
    """Return settings with the values that the groups have under the same names, and `others`."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    given = {name: value for group in groups for name, value in vars(group).items() if name in names}
    return kind(**{**given, **others})


def heading(group: type) -> str:
    """Return what the help calls a group: the first line of its docstring or, where that is stripped, its name."""
    told = (group.__doc__ or "").strip()
    written_by_dataclass = told.startswith(f"{group.__name__}(")
    return group.__name__ if not told or written_by_dataclass else told.splitlines()[0].rstrip(".")


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=_under(heading(group), hints[field.name]),
        )
        for field in fields(group)
    ]


def _under(heading: str, annotation: Any) -> Any:
    """Return an annotation whose option stands under a heading; options may be shared, so their own stays as it is."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *metadata = get_args(annotation)
    metadata = [copy(one) if isinstance(one, ParameterInfo) else one for one in metadata]
    for one in metadata:
        if isinstance(one, ParameterInfo):
            one.rich_help_panel = one.rich_help_panel or heading
    return Annotated[kind, *metadata]
