"""The architectures of the zoo: name, origin, size, inputs, and the extra needed to build them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gpuprof.domain.catalogue import datasets
from gpuprof.errors import unknown_name

ONNX, TRANSFORMERS, OURS = "onnx", "transformers", "gpuprof"


@cache
def read_zoo() -> Mapping[str, Any]:
    """Return the content of ``datasets/zoo.toml``, whose head explains it."""
    with (datasets() / "zoo.toml").open("rb") as file:
        return tomllib.load(file)


@dataclass(frozen=True, slots=True)
class TransformersExport:
    """Parameters of the export of a model of ``transformers``."""

    config: str  #: Class of the configuration.
    model: str  #: Class of the model.
    inputs: tuple[str, ...]  #: Inputs in the order of the exported file.
    outputs: tuple[str, ...]  #: Exported fields of the model's result.
    settings: Mapping[str, object] = field(default_factory=dict)  #: Differences from the configuration's defaults.
    fixed: Mapping[str, object] = field(default_factory=dict)  #: Arguments of the call other than inputs.
    side: int = 224  #: Side of images in pixels.
    floats: tuple[str, ...] = ()  #: Integer inputs converted to floats for the model.


@dataclass(frozen=True, slots=True)
class ZooArchitecture:
    """A network of the zoo."""

    name: str
    #: Source of the definition: ``"onnx"`` (shipped with that package), ``"transformers"`` (exported from the library's
    #: configuration and code) or ``"gpuprof"`` (not a published network).
    origin: str
    stem: str  #: Name in the origin.
    parameters: int  #: Number of parameters, statistics of normalisations included.
    input: str  #: Names and shapes of its inputs.
    export: TransformersExport | None = None  #: How it is exported; None unless its origin is ``"transformers"``.

    @property
    def needs(self) -> str:
        """Extra of gpuprof needed for building; empty: none."""
        return "export" if self.origin == TRANSFORMERS else ""


def _read_architecture(name: str, table: Mapping[str, Any]) -> ZooArchitecture:
    common = {key: table[key] for key in ("origin", "parameters", "input")}
    export: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in table.items()
        if key not in common and key != "stem"
    }
    return ZooArchitecture(
        name, stem=table.get("stem", name), export=TransformersExport(**export) if export else None, **common
    )


#: Every architecture by its name.
ARCHITECTURES = {name: _read_architecture(name, table) for name, table in read_zoo()["architectures"].items()}


def find_architecture(name: str) -> ZooArchitecture:
    """Return an architecture by name. Raises `InputError` for an unknown name; the message gives the nearest."""
    if name not in ARCHITECTURES:
        raise unknown_name("network of the zoo", name, list(ARCHITECTURES))
    return ARCHITECTURES[name]
