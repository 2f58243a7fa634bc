"""Settings: each option declared once, with its help, for the library and the command line alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from gpuprof.domain.deployment import LARGEST_BATCH
from gpuprof.domain.sizes import parse_dims, single_sizes
from gpuprof.domain.validation import LARGEST, NotNegative, collect_distinct, describe_error
from gpuprof.errors import InputError

#: Help of settings that several verbs have.
PRECISION = "Precision of predictions: float32, tf32, float16, bfloat16, fp8 or int8."
RUNTIME = (
    "Runtime that predictions assume: onnxruntime (default), tensorrt, pytorch-eager, pytorch-script (TorchScript) or "
    "pytorch-compiled; with :fused-attention if its optimizer fuses attention into one kernel."
)
HOST_US = "Microseconds that the host takes for a launch; default: the runtime's usual time, within a factor of 1.4."
DEVICE_FILE = "TOML file with GPUs that gpuprof does not know."
ARRIVALS = "Arrival process: constant, poisson, gamma:SCV, bursts:RATIO,BURST,CALM or diurnal:PEAK,PERIOD."


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Presentation of a setting on the command line.

    ``flags``: names; default: the field's own. ``repeated``: whether the option may be given several times. ``unit``:
    of a length of time, which is then read as ``500ms`` or ``2m``. ``values``: kind of names that complete the option.
    ``unset``: whether the command line has no default. ``output``: ``"file"`` or ``"folder"`` for a path that is
    written. ``panel``: heading in the help; default: the class's title.
    """

    flags: tuple[str, ...] = ()
    metavar: str | None = None
    panel: str | None = None
    values: str | None = None
    unit: str | None = None
    envvar: str | None = None
    repeated: bool = False
    unset: bool = False
    output: str = ""


def option(default: Any, text: str, *flags: str, **presentation: Any) -> Any:
    """Return a field with its default and ``text`` as its help; ``presentation``: fields of `CommandLine`."""
    return Field(default, description=text, json_schema_extra=asdict(CommandLine(flags, **presentation)))


def command_line(field: FieldInfo) -> CommandLine:
    """Return how a setting is presented on the command line."""
    extra = field.json_schema_extra
    return CommandLine(**extra) if isinstance(extra, Mapping) else CommandLine()  # type: ignore[arg-type]


class Settings(BaseModel):
    """Frozen settings; a wrong value raises an `InputError` with the field, the rule and the value."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    title: ClassVar[str] = "Options"  #: Heading of the options in the help.

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise describe_error(type(self).__name__, error) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Document the fields by their help."""
        super().__pydantic_init_subclass__(**kwargs)
        if cls.__doc__ and cls.model_fields:
            lines = (f"{name}\n    {field.description}" for name, field in cls.model_fields.items())
            cls.__doc__ = "\n".join([cls.__doc__.rstrip(), "", "Attributes", "----------", *lines])

    @classmethod
    def collect(cls, settings: Self | None, fields: Mapping[str, Any]) -> Self:
        """Return settings given as an object, or by their fields as keywords."""
        return cls(**fields) if settings is None else settings.replace(**fields)

    def replace(self, **changes: Any) -> Self:
        """Return a copy of the settings with some fields changed."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    def list_words(self, without: Iterable[str] = ()) -> list[str]:
        """Return the command line of the given settings; ``without``: fields to leave out."""
        words = []
        for name in sorted(self.model_fields_set - set(without)):
            value, flag = getattr(self, name), flag_of(type(self), name)
            if isinstance(value, bool):
                words += [flag] if value else []
            elif isinstance(value, Mapping):
                words += [f"{flag}={f'{key}=' if key else ''}{_join(item)}" for key, item in value.items()]
            elif command_line(type(self).model_fields[name]).repeated:
                words += [f"{flag}={item}" for item in value]
            elif value is not None:
                words.append(f"{flag}={_join(value)}")
        return words


def flag_of(kind: type[Settings], name: str) -> str:
    """Return the long option of a setting."""
    flags = command_line(kind.model_fields[name]).flags
    return next((flag for flag in flags if flag.startswith("--")), f"--{name.replace('_', '-')}")


def _join(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _read_dims(value: object) -> object:
    return parse_dims(value) if isinstance(value, list | tuple) else value


def _read_single_dims(value: object) -> object:
    return single_sizes(parse_dims(value)) if isinstance(value, list | tuple) else value


def by_model(what: str, parse: Callable[[str], tuple[str, Any]]) -> BeforeValidator:
    """Return a validator that reads texts ``[MODEL=]VALUE``, without a model for all others, whose name is ``""``.

    ``what`` names the values in the error for a repeated model; ``parse`` splits a text into pairs.
    """

    def read(value: object) -> object:
        return collect_distinct(what, map(parse, value)) if isinstance(value, list | tuple) else value

    return BeforeValidator(read)


def _parse_data_file(text: str) -> tuple[str, Path]:
    model, separator, path = text.partition("=")
    return (model, Path(path)) if separator and not Path(text).exists() else ("", Path(text))


def _parse_rate(text: str) -> tuple[str, float]:
    model, separator, number = text.rpartition("=")
    try:
        rate_rps = float(number)
    except ValueError:
        rate_rps = -1.0
    if rate_rps > LARGEST:
        raise InputError(f"a rate must be at most {LARGEST:,.0f} requests/s but got {text!r}", "correct the rate")
    if not rate_rps > 0.0 or (separator and not model):
        raise InputError(f"cannot read the rate {text!r}", "write MODEL=REQUESTS_PER_S, or REQUESTS_PER_S of all")
    return model, rate_rps


def split_names(value: object) -> object:
    """Return the words of a text that separates them by commas; other values unchanged."""
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


#: Texts: a sequence, or one text that separates them by commas.
Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(split_names)]


def _read_sizes(value: object) -> object:
    """Return the whole numbers in a text such as ``1,8,32``, ascending; other values unchanged."""
    if not isinstance(value, str):
        return value
    words, digits = [word.strip() for word in value.split(",")], len(str(LARGEST_BATCH))
    if not all(word.isdecimal() and len(word) <= digits and 1 <= int(word) <= LARGEST_BATCH for word in words):
        raise ValueError(f"must be whole numbers from 1 to {LARGEST_BATCH:,}, as in 1,8,32,")
    return tuple(sorted(set(map(int, words))))


READ_RATES = by_model("the rate", _parse_rate)

#: Size of each free dimension: a mapping, or texts ``NAME=SIZE``.
Dims: TypeAlias = Annotated[Mapping[str, int], BeforeValidator(_read_single_dims)]
#: Sizes of each free dimension: a mapping, or texts ``NAME=SIZE[,SIZE...]``.
ManyDims: TypeAlias = Annotated[Mapping[str, int | tuple[int, ...]], BeforeValidator(_read_dims)]
#: Input data of each model: a mapping, or texts ``[MODEL=]FILE``.
DataFiles: TypeAlias = Annotated[Mapping[str, Path], by_model("the input data", _parse_data_file)]
#: Requests per second of each model, and of all together under ``""``: a mapping, or texts ``[MODEL=]REQUESTS_PER_S``.
Rates: TypeAlias = Annotated[Mapping[str, NotNegative], READ_RATES]

#: A batch size.
Batch: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
#: Batch sizes, ascending: a sequence, or a text such as ``1,8,32``.
Batches: TypeAlias = Annotated[tuple[Batch, ...], BeforeValidator(_read_sizes)]
