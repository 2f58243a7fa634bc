"""Command lines for the steps of a file: options that a step omits are taken from the file's models and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuprof.cli.config_file import error_at, list_options, read_value
from gpuprof.cli.plan_file import PlannedStep, RunPlan
from gpuprof.errors import GpuprofError, InputError, unknown_name

#: Verbs on models, and verbs on demands.
_OF_MODELS = frozenset({"profile", "estimate"})
_OF_DEMANDS = frozenset({"place", "compare"})
#: The verb that makes the map for later steps.
_MAKES_MAP = "place"
#: Verbs that fill a database, which a report can then show.
_FILLS_DATABASE = frozenset({"profile", "calibrate", "train"})
_RESULTS = {"place": "map.json", "simulate": "simulation.json", "report": "report.html"}
#: Options for output files.
_OUTPUTS = frozenset({"output", "figures", "picture"})
#: Verbs whose results a report shows by default.
_REPORTED = frozenset({"place", "simulate", "evaluate", "load"})


@dataclass(frozen=True, slots=True)
class StepCommand:
    """A command line of a step."""

    words: tuple[str, ...]  #: Without ``gpuprof``.
    verb: str
    save: Path | None  #: File for the printed output.
    #: ``inputs``, ``outputs``: Files and folders read and written by the command, as far as its words name them.
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]


@dataclass(slots=True)
class _Results:
    """The results of the steps so far."""

    map_file: str
    has_database: bool
    reported: list[str] = field(default_factory=list)


def list_commands(plan: RunPlan, group: Any) -> list[StepCommand]:
    """Return the command lines of a plan, in their order.

    ``group``: click group of all verbs. Raises `InputError` with the line: an unknown option, an impossible value, or
    a missing option.
    """
    results = _Results(str(plan.folder / "map.json"), Path(plan.db).exists())
    commands: list[StepCommand] = []
    for step in plan.steps:
        command = _find_command(plan, step, group)
        given = _read_options(plan, step, command)
        saved: set[Path | None] = set()
        for number, filled in enumerate(_fill_in(plan, step, command, given, results), start=1):
            _check_values(plan, step, command, filled)
            save = _save_path(plan, step, filled)
            if save is not None and save in saved:  # models at other sizes
                save = save.with_stem(f"{save.stem}-{number}")
            saved.add(save)
            commands.append(_make_command(plan, step, command, filled, save))
        if step.verb[0] == _MAKES_MAP:
            results.map_file = str(filled.get("output", results.map_file))
        results.has_database |= step.verb[0] in _FILLS_DATABASE
        written = filled.get("output") if step.save is None else str(commands[-1].save)
        if step.verb[0] in _REPORTED and written is not None and Path(str(written)).suffix in {".json", ".parquet"}:
            results.reported.append(str(written))
    return commands


def _find_command(plan: RunPlan, step: PlannedStep, group: Any) -> Any:
    command = group
    for word in step.verb:
        inner: Mapping[str, Any] = getattr(command, "commands", {})
        if word not in inner:
            raise error_at(plan.path, step.node, unknown_name(f"command of {command.name}", word, [*inner]))
        command = inner[word]
    if inner := getattr(command, "commands", {}):
        names = ", ".join(f"{' '.join(step.verb)} {name}" for name in inner)
        raise error_at(plan.path, step.node, InputError(f"{command.name} has commands of its own", names))
    return command


def _read_options(plan: RunPlan, step: PlannedStep, command: Any) -> dict[str, Any]:
    """Return the values of a step by the names of the parameters, as texts, lists of texts and flags."""
    known, values = list_options(command), dict[str, Any]()
    for key, node in step.options:
        if key.value not in known:
            kind = f"option of {' '.join(step.verb)}"
            raise error_at(plan.path, key, unknown_name(kind, key.value, [*known, "save"]))
        parameter = known[key.value]
        value = read_value(plan.path, node, parameter)
        if value is not None:
            values[parameter.name] = value
    return values


def _fill_in(
    plan: RunPlan, step: PlannedStep, command: Any, given: Mapping[str, Any], results: _Results
) -> list[dict[str, Any]]:
    """Return the values of each command line of a step: a line for each device and sizes where a command takes one."""
    names, verb = {parameter.name for parameter in command.params}, step.verb[0]
    usual: dict[str, Any] = {"map_file": results.map_file}
    if results.has_database or verb in _FILLS_DATABASE:
        usual["db"] = plan.db
    if verb in _OF_MODELS:
        usual["models"] = plan.files()
    if verb in _OF_DEMANDS and plan.models:
        _check_demands(plan, step)
        usual["slo_file"] = str(plan.folder / "slo.csv")
    if plan.devices and "fleet" not in given:
        usual["gpus"] = ",".join(plan.devices)
    if verb in _RESULTS:
        usual["output"] = str(plan.folder / _RESULTS[verb])
    if verb == "export":
        usual["output"] = str(plan.folder / f"export-{given.get('to', 'tool')}")
    if verb == "report":
        usual["sources"] = [*([plan.db] if results.has_database else []), *results.reported]
    filled = {name: value for name, value in usual.items() if name in names and value} | dict(given)
    if verb in _OF_MODELS and "models" not in given and "dim" not in given:
        return [
            with_device
            for files, dims in plan.group_by_dims()
            for with_device in _for_each_device(
                plan, verb, filled | {"models": files} | ({"dim": dims} if dims else {})
            )
        ]
    return _for_each_device(plan, verb, filled)


def _for_each_device(plan: RunPlan, verb: str, filled: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the values for the command lines of a step: one for each device where a command takes a single device."""
    kinds = [one.partition(":")[0] for one in plan.devices]
    if verb == "estimate" and "device" not in filled and kinds and "any" not in kinds:
        return [filled | {"device": kind} for kind in kinds]
    return [filled]


def _check_demands(plan: RunPlan, step: PlannedStep) -> None:
    for name, model in plan.models.items():
        missing = [what for what in ("rate_rps", "slo_ms") if getattr(model, what) is None]
        if missing:
            said = f"{step.verb[0]} needs {' and '.join(missing)} of the model {name}"
            raise error_at(plan.path, step.node, InputError(said, f"{name}: {{rate_rps: 100, slo_ms: 50, …}}"))


def _check_values(plan: RunPlan, step: PlannedStep, command: Any, filled: Mapping[str, Any]) -> None:
    """Refuse values that the command line would refuse, before the first step; outputs are checked when written."""
    shown = {name: Path(str(value)).name if name in _OUTPUTS else value for name, value in filled.items()}
    # Outputs by their names alone, in the current folder: theirs may be made by an earlier step.
    operands, options = _words(command, shown)
    try:
        command.make_context(" ".join(step.verb), [*options, *operands])
    except GpuprofError as error:
        raise error_at(plan.path, step.node, InputError(error.message, error.fix)) from None
    except Exception as error:  # some typer versions copy click: its errors are recognised by their attributes
        if not hasattr(error, "format_message"):
            raise
        name = getattr(getattr(error, "param", None), "name", None)
        known = list_options(command)
        node = next((node for key, node in step.options if known[key.value].name == name), step.node)
        said = InputError(error.format_message().rstrip("."), f"gpuprof {' '.join(step.verb)} --help")
        raise error_at(plan.path, node, said) from None


def _save_path(plan: RunPlan, step: PlannedStep, filled: Mapping[str, Any]) -> Path | None:
    """Return the file for a command's printed output, with the device in its name where a step has several devices."""
    if step.save is None:
        return None
    path = plan.folder / step.save
    is_split = step.verb[0] == "estimate" and len(plan.devices) > 1 and "device" in filled
    return path.with_stem(f"{path.stem}-{filled['device']}") if is_split else path


def _make_command(
    plan: RunPlan, step: PlannedStep, command: Any, filled: Mapping[str, Any], save: Path | None
) -> StepCommand:
    inputs = [Path(file) for file in plan.files()]
    outputs: list[Path] = []
    for name, value in filled.items():
        (outputs if name in _OUTPUTS else inputs).extend(Path(text) for text in _texts(value) if text)
    if save is not None:
        outputs.append(save)
    operands, options = _words(command, filled)
    if save is not None and save.suffix != ".txt":
        options.append(f"--{save.suffix[1:]}")
    return StepCommand((*step.verb, *operands, *options), step.verb[0], save, tuple(inputs), tuple(outputs))


def _words(command: Any, filled: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    operands: list[str] = []
    options: list[str] = []
    for parameter in command.params:
        value = filled.get(parameter.name)
        if value is None:
            continue
        if parameter.param_type_name == "argument":
            operands += _texts(value)
        else:
            options += _option_words(parameter, value)
    return operands, options


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [] if isinstance(value, bool) else list(value)


def _option_words(parameter: Any, value: Any) -> list[str]:
    name = next(word for word in (*parameter.opts, *parameter.secondary_opts) if word.startswith("--"))
    if isinstance(value, bool):
        off = next((word for word in parameter.secondary_opts if word.startswith("--")), None)
        return [name] if value else [off] if off else []
    return [word for text in _texts(value) for word in (name, text)]
