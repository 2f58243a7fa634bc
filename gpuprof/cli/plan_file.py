"""Reader for the file of ``gpuprof run``: models, devices and steps of a whole run, with the line of each error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gpuprof.cli.config_file import error_at, read_pairs, read_yaml
from gpuprof.domain.sizes import parse_mix
from gpuprof.errors import InputError, unknown_name

#: Verbs that run until interrupted, or need such a server, and ``run`` itself.
_NO_STEPS = frozenset({"serve", "apply", "run"})
#: File name endings that select the printed format of a step: JSON, CSV or a table.
_SAVED = frozenset({".json", ".csv", ".txt"})

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlannedModel(_Part):
    """A service: its model as a file, or by its name in the database, and its demand, as in slo.csv."""

    file: str | None = None
    model: str | None = None
    rate_rps: Positive | None = None
    slo_ms: Positive | None = None
    percentile: Annotated[float, Field(ge=1.0, le=99.999)] | None = None
    min_goodput_rps: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    priority: int | None = None
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    dims: str | None = None


def _as_list(value: object) -> object:
    return [one.strip() for one in value.split(",")] if isinstance(value, str) else value


class _Header(_Part):
    """The content of the file except the steps, whose options are the verbs' own."""

    models: dict[str, PlannedModel] = Field(default_factory=dict)
    devices: Annotated[list[str], BeforeValidator(_as_list)] = Field(default_factory=list)
    db: str = "gpuprof-db"
    folder: str = "gpuprof-run"
    steps: Any = None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step in the file."""

    verb: tuple[str, ...]  #: A verb, or the two words of a command: ``("zoo", "build")``.
    options: tuple[tuple[yaml.ScalarNode, yaml.Node], ...]  #: Options as on the command line.
    save: str | None  #: File for the printed output of the step: JSON, CSV or text.
    node: yaml.Node  #: Node of the step in the file.


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A whole run: services by name, devices as ``--gpus`` has them, database, folder of results, steps."""

    path: Path
    models: dict[str, PlannedModel]
    devices: tuple[str, ...]
    db: str
    folder: Path
    steps: tuple[PlannedStep, ...]

    def files(self) -> list[str]:
        """Return the models' files, each once."""
        return list(dict.fromkeys(model.file for model in self.models.values() if model.file is not None))

    def group_by_dims(self) -> list[tuple[list[str], list[str]]]:
        """Return the models' files by the sizes that their requests have, as ``--dim`` takes them."""
        sizes: dict[str, dict[str, dict[int, None]]] = {file: {} for file in self.files()}
        for model in self.models.values():
            if model.file is not None and model.dims is not None:
                for named, _ in parse_mix(model.dims).parts:
                    for name, size in named:
                        sizes[model.file].setdefault(name, {})[size] = None
        groups: dict[tuple[str, ...], list[str]] = {}
        for file, dims in sizes.items():
            key = tuple(f"{name}={','.join(map(str, values))}" for name, values in dims.items())
            groups.setdefault(key, []).append(file)
        return [(files, list(dims)) for dims, files in groups.items()]


def read_plan(path: Path, verbs: Sequence[str]) -> RunPlan:
    """Return the plan in a file, with all keys and values checked.

    Raises `InputError` with the line: no YAML, an unknown key or verb, an impossible value, or no step.
    """
    root = read_yaml(path, "steps")
    if root is None:
        raise InputError(f"{path} is empty", "it needs steps, as in steps: [doctor]")
    header = _read_header(path, root)
    for name, model in header.models.items():
        if model.file is None and model.model is None:
            node = _find_node(root, ("models", name))
            raise error_at(path, node, InputError(f"{name} has neither a file nor a model", "file: MODEL.onnx"))
    steps = next((value for key, value in read_pairs(root, path, "a key") if key.value == "steps"), None)
    if not isinstance(steps, yaml.SequenceNode) or not steps.value:
        raise error_at(path, steps or root, InputError("steps must be a list of verbs", "steps: [profile, place]"))
    planned = tuple(_read_step(path, one, [verb for verb in verbs if verb not in _NO_STEPS]) for one in steps.value)
    return RunPlan(path, header.models, tuple(header.devices), header.db, Path(header.folder), planned)


def _read_header(path: Path, root: yaml.Node) -> _Header:
    _refuse_twice(path, root)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path}: {str(error).splitlines()[0]}", "plain texts, numbers, lists and keys") from None
    if not isinstance(content, dict):
        raise error_at(path, root, InputError("the file is no mapping", "it needs steps, as in steps: [doctor]"))
    try:
        return _Header.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(str(part) for part in first["loc"])
        node, name = _find_node(root, where), ".".join(where)
        if first["type"] == "extra_forbidden":
            kind = PlannedModel if where[0] == "models" else _Header
            raise error_at(path, node, unknown_name("key", where[-1], list(kind.model_fields))) from None
        what = first["msg"].replace("a valid dictionary", "names with their values")
        message = f"{name or 'the file'}: {what[0].lower()}{what[1:]}"
        got = "" if isinstance(first["input"], dict | list) else f" but got {first['input']!r}"
        fix = "as in models: {NAME: {file: MODEL.onnx, rate_rps: 10, slo_ms: 50}}" if where[0] == "models" else ""
        raise error_at(path, node, InputError(f"{message}{got}", fix)) from None


def _read_step(path: Path, node: yaml.Node, verbs: Sequence[str]) -> PlannedStep:
    pairs: list[tuple[yaml.ScalarNode, yaml.Node]] = []
    key: yaml.Node = node
    if isinstance(node, yaml.MappingNode):
        given = read_pairs(node, path, "a step")
        if len(given) != 1:
            hint = "indent its options by four spaces more than its verb"
            raise error_at(path, node, InputError(f"a step is one verb but got {len(given)}", hint))
        key, value = given[0]
        if not (isinstance(value, yaml.ScalarNode) and value.tag == "tag:yaml.org,2002:null"):
            pairs = read_pairs(value, path, "an option")
    if not isinstance(key, yaml.ScalarNode) or not key.value:
        raise error_at(path, node, InputError("a step is a verb, or a verb with options", "place: {confidence: 0.9}"))
    words = tuple(key.value.split())
    if not words or words[0] not in verbs:
        if words and words[0] in _NO_STEPS:
            raise error_at(path, key, InputError(f"{words[0]} is no step of a run", f"gpuprof {words[0]} by itself"))
        raise error_at(path, key, unknown_name("verb", words[0] if words else "", list(verbs)))
    save = next(((one, value) for one, value in pairs if one.value == "save"), None)
    return PlannedStep(
        words,
        tuple(pair for pair in pairs if pair is not save and pair[0].value != "save"),
        None if save is None else _read_save(path, save[1]),
        key,
    )


def _read_save(path: Path, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode) or Path(node.value).suffix not in _SAVED:
        raise error_at(path, node, InputError("save takes a file", f"which ends in {', '.join(sorted(_SAVED))}"))
    return str(node.value)


def _refuse_twice(path: Path, root: yaml.Node) -> None:
    """Refuse a repeated key, of which YAML would silently take the last."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            waiting += node.value
            continue
        names: set[str] = set()
        for key, value in node.value:
            waiting.append(value)
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise error_at(path, key, InputError(f"{key.value} stands twice", "leave one of them out"))
            names.add(str(key.value))


def _find_node(node: yaml.Node, where: Sequence[str]) -> yaml.Node:
    """Return the node at a path, or the nearest node above it; for the last part of the path, its key."""
    for depth, part in enumerate(where):
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        found = next(((key, value) for key, value in pairs if key.value == part), None)
        if found is not None:
            node = found[0] if depth == len(where) - 1 else found[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
    return node
