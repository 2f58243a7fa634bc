"""Options of verbs: made by typer from settings, their completion, lengths of time, and files to write."""

from __future__ import annotations

import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from keyword import iskeyword
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from gpuprof.cli.output import Format, chosen_format
from gpuprof.domain.file_access import describe_special_file, find_write_obstacle
from gpuprof.domain.validation import ArgumentError, parse_duration
from gpuprof.errors import InputError
from gpuprof.pipeline.settings import Settings, command_line, flag_of


def _complete(names: Iterable[str], incomplete: str) -> list[str]:
    """Complete the last of the names that commas separate."""
    before, comma, word = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in sorted(set(names)) if name.startswith(word)]


def complete_devices(incomplete: str) -> list[str]:
    """Return the devices of the catalogue."""
    from gpuprof.domain.catalogue import devices

    return _complete(["cpu", *devices()], incomplete)


def complete_policies(incomplete: str) -> list[str]:
    """Return the policies, installed ones too."""
    from gpuprof.placement.policies import policy_names

    return _complete(policy_names(), incomplete)


def complete_models(incomplete: str) -> list[str]:
    """Return the models of the database, ONNX files, and folders, which may hold ONNX files."""
    from gpuprof.pipeline.db import list_measured_models

    names: list[str] = []
    with suppress(Exception):  # a shell has no place to show that there is no database, or folder
        names += _complete((str(row["model"]) for row in list_measured_models().rows()), incomplete)
    with suppress(OSError, ValueError):
        for path in sorted(Path().glob(f"{incomplete}*")):
            names += [f"{path}/"] if path.is_dir() else [str(path)] if path.suffix == ".onnx" else []
    return [name for name in names if not name.startswith(".")]


_COMPLETERS = {"devices": complete_devices, "policies": complete_policies}


MapFileArgument = Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map.")]
DbOption = Annotated[Path, typer.Option(envvar="GPUPROF_DB", help="Kernel database.")]
DEFAULT_DB = Path("gpuprof-db")

ModelsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        autocompletion=complete_models,
        metavar="MODEL...",
        help="ONNX files, or NAME=FILE to name one.",
        show_default=False,
    ),
]
NetworksArgument = Annotated[
    list[Path], typer.Argument(autocompletion=complete_models, help="ONNX files, two or more.")
]


_Function = TypeVar("_Function", bound=Callable[..., Any])


_FORMATS = {
    "as_json": Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")],
    "as_csv": Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")],
}


class _Command(TyperCommand):
    """A command that refuses a repeated option of a single value, of which click would take the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. Raises `InputError` for an option that is given twice and takes a single value."""
        if args and not ctx.resilient_parsing:
            _, _, parameters = self.make_parser(ctx).parse_args(args=list(args))
            parameter: Any
            for parameter, count in Counter(parameters).items():
                is_single = parameter.param_type_name == "option" and not parameter.multiple and not parameter.is_flag
                if is_single and count > 1:
                    name = max(parameter.opts, key=len)
                    raise InputError(f"{name} is given {count} times and takes one value", f"give {name} once")
        return super().parse_args(ctx, args)


class Verbs(typer.Typer):
    """A group of commands; without a command it prints its help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        """Register a command, as typer does, with options made of its settings."""
        register = super().command(name, cls=_Command, **settings)

        def add(function: _Function) -> _Function:
            register(_with_options(function))
            return function

        return add


def _with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Return ``verb`` with a signature for typer: the fields of its settings become options.

    ``verb``: parameters whose type is a `Settings` are groups: each field becomes an option, in the help under the
    heading of its group. A parameter of type `Format` becomes the options for JSON and CSV. Others stay unchanged.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, type[Settings]] = {name: kind for name, kind in hints.items() if _is_settings(kind)}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(verb).parameters.items():
        if name in groups:
            options = (_make_option(groups[name], key, field) for key, field in groups[name].model_fields.items())
            parameters |= {option.name: option for option in options}
        elif hints[name] is Format:
            for flag, option in _FORMATS.items():
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters[flag] = inspect.Parameter(flag, kind, default=False, annotation=option)
        else:
            parameters[name] = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)

    def read_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: value for name, value in arguments.items() if name in hints}
        for name, kind in hints.items():
            if name in groups:
                values[name] = _fill(groups[name], arguments)
            elif kind is Format:
                values[name] = chosen_format(arguments["as_json"], arguments["as_csv"])
        return values

    @functools.wraps(verb)
    def flat(**arguments: Any) -> None:
        verb(**read_values(arguments))

    flat.read_values = read_values  # type: ignore[attr-defined]  # checks a command line without running it
    # typer reads the signature and the annotations, which `wraps` has taken from the verb.
    flat.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    flat.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return flat


def _is_settings(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Settings)


def _fill(kind: type[Settings], args: Mapping[str, Any]) -> Settings:
    """Return a group with the values of the command line; omitted options keep their field's default."""
    values = {}
    for name, field in kind.model_fields.items():
        option = _make_option(kind, name, field)
        if args[option.name] != option.default:
            values[name] = args[option.name]
    try:
        return kind(**values)
    except ArgumentError as error:
        raise InputError(f"{flag_of(kind, error.name)} {error.rule}") from None


def _make_option(group: type[Settings], name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the parameter from which typer makes the option of a setting."""
    option, kinds = command_line(field), set(_plain_types(field.annotation))
    default = field.get_default(call_default_factory=True)
    flag = flag_of(group, name)
    details: dict[str, Any] = {"help": field.description, "metavar": option.metavar, "envvar": option.envvar}
    kind: Any = float
    if option.unit is not None:
        # Defaults come through the parser as well.
        parse = functools.partial(parse_duration, what=flag, takes_zero=True, unit=option.unit)
        details |= {"parser": lambda value: parse(str(value)), "metavar": "TIME"}
    elif option.repeated:
        kind, default = list[str], default or None
    else:
        kind = _command_line_type(kinds)
        if kind is str and isinstance(default, tuple | list):
            default = ",".join(map(str, default)) or None
    if option.output:
        details["callback"] = check_output_file if option.output == "file" else check_output_folder
    if option.values is not None:
        details["autocompletion"] = _COMPLETERS[option.values]
    if option.unset:
        default = None
    if default is None:
        kind = kind | None
    typer_option = typer.Option(*(option.flags or (flag,)), rich_help_panel=option.panel or group.title, **details)
    parameter = flag[2:].replace("-", "_")
    parameter += "_" * iskeyword(parameter)
    return inspect.Parameter(
        parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, typer_option]
    )


def _plain_types(hint: Any) -> Iterator[Any]:
    """Yield the classes of a hint: the members of a union, without their annotations."""
    if get_origin(hint) is Annotated:
        yield from _plain_types(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _plain_types(part)
    else:
        yield get_origin(hint) or hint


def _command_line_type(kinds: set[Any]) -> Any:
    if kinds & {Path, os.PathLike}:
        return Path
    single = kinds - {NoneType}
    if len(single) == 1 and inspect.isclass(only := next(iter(single))) and issubclass(only, bool | int | float | Enum):
        return only
    return str


def check_output_file(path: Path | None) -> Path | None:
    """Return the path of a file to write, as the callback of an option.

    Raises `InputError` when the path is a directory or a named pipe, its directory is missing, or writing is not
    permitted.
    """
    if path is None:
        return None
    folder, fix = path.absolute().parent, "name a file that you may write"
    obstacle: str | None
    if path.is_dir():
        obstacle, fix = "it is a directory", "name a file in it"
    elif path.is_fifo() and describe_special_file(path):
        obstacle, fix = "it is a named pipe, which nobody may read", "name a file"
    elif not folder.is_dir():
        obstacle = f"{folder} {'is no directory' if folder.exists() else 'does not exist'}"
        fix = "name a file in a directory that exists"
    elif path.exists():
        obstacle = None if os.access(path, os.W_OK) else "permission denied"
    else:
        obstacle = find_write_obstacle(folder)
    if obstacle is not None:
        raise InputError(f"cannot write {path}: {obstacle}", fix)
    return path


def check_output_folder(path: Path | None) -> Path | None:
    """Return the path of an output directory, created where missing, as the callback of an option.

    Raises `InputError` when the path is a file or below a file, or the directory may not be created or written to.
    """
    if path is None:
        return None
    nearest = path.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise InputError(f"cannot write to {path}: {nearest} is no directory", "name another directory")
    if (obstacle := find_write_obstacle(nearest)) is not None:
        raise InputError(f"cannot write to {path}: {obstacle}", "name a directory that you may write to")
    return path


def output_option(text: str, **more: Any) -> Any:
    """Return the option ``-o``, ``--output`` for a file to write, with ``text`` as its help."""
    return typer.Option("-o", "--output", callback=check_output_file, help=text, **more)
