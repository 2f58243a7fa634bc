"""``gpuprof run``: run a whole plan from one file that can be committed."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gpuprof import __version__
from gpuprof.cli.output import say, say_note
from gpuprof.domain.file_access import read_input, write_atomically
from gpuprof.domain.sizes import parse_mix
from gpuprof.domain.validation import Count, NotNegative
from gpuprof.errors import GpuprofError, InputError, UnstableError, refuse_unwritable, unknown_name
from gpuprof.pipeline.settings import split_names


def run(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="YAML file: models, devices and steps.")] = Path(
        "plan.yaml"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command of each step and run none.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run every step, those done before too.")] = False,
) -> None:
    """Run the steps of a file: profile, estimate, place, check, simulate, export, report and others.

    Steps that were done before are left out unless what they read or what they wrote has changed.
    """
    from gpuprof.cli.main import build_app

    file, plan = read_plan(plan_file)
    with contextlib.chdir(plan_file.absolute().parent):  # relative paths start at the file's folder
        reader = _StepReader(file, plan, typer.main.get_command(build_app()))
        commands = [command for number in range(len(plan.steps)) for command in reader.read_step(number)]
        if not dry_run:
            if code := run_steps(file.path, plan, commands, fresh):
                raise typer.Exit(code)
            return
        if plan.models:
            sys.stdout.write(f"# {plan.folder / 'slo.csv'}:\n")
            sys.stdout.write("".join(f"#   {line}\n" for line in plan.write_csv().splitlines()))
        sys.stdout.write("".join(f"{command.line}\n" for command in commands))


#: Verbs that run until interrupted, or need such a server, and ``run`` itself.
_NO_STEPS = frozenset({"serve", "apply", "run"})
#: File name endings that select the printed format of a step: JSON, CSV or a table.
_SAVED = frozenset({".json", ".csv", ".txt"})
_OF_MODELS = frozenset({"profile", "estimate"})
_OF_DEMANDS = frozenset({"place", "compare"})
#: Verbs that fill a database, which a report can then show.
_FILLS_DATABASE = frozenset({"profile", "calibrate", "train"})
_RESULTS = {"place": "map.json", "simulate": "simulation.json", "report": "report.html"}
#: Options for output files.
_OUTPUTS = frozenset({"output", "junit"})
#: Verbs whose results a report shows by default.
_REPORTED = frozenset({"place", "simulate", "evaluate", "load"})
_FLAGS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)

_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlannedModel(_Part):
    """A service: its model as a file, or by its name in the database, and its demand, in the columns of slo.csv."""

    model: str | None = None
    rate_rps: _Positive | None = None
    slo_ms: _Positive | None = None
    service: str | None = None
    file: str | None = None
    percentile: Annotated[float, Field(ge=1.0, le=99.999)] | None = None
    min_goodput_rps: NotNegative | None = None
    priority: int | None = None
    max_replicas: Count | None = None
    dims: str | None = None

    def files(self) -> list[str]:
        """Return the files of the steps of a chain, or that of the model, if it has one."""
        return [] if self.file is None else [step.strip() for step in self.file.split(">")]


class RunPlan(_Part):
    """A whole run: services by name, devices as ``--gpus`` has them, database, folder of results, steps."""

    models: dict[str, PlannedModel] = Field(default_factory=dict)
    devices: Annotated[list[str], BeforeValidator(split_names)] = Field(default_factory=list)
    db: str = "gpuprof-db"
    folder: Path = Path("gpuprof-run")
    steps: Annotated[list[Any], Field(min_length=1)]

    def files(self) -> list[str]:
        """Return the models' files, each once."""
        return list(dict.fromkeys(file for model in self.models.values() for file in model.files()))

    def group_by_dims(self) -> list[tuple[list[str], list[str]]]:
        """Return the models' files by the sizes that their requests have, as ``--dim`` takes them."""
        sizes: dict[str, dict[str, dict[int, None]]] = {file: {} for file in self.files()}
        for model in self.models.values():
            if model.dims is not None:
                for part, _ in parse_mix(model.dims).parts:
                    for (name, size), file in product(part, model.files()):
                        sizes[file].setdefault(name, {})[size] = None
        groups: dict[tuple[str, ...], list[str]] = {}
        for file, dims in sizes.items():
            key = tuple(f"{name}={','.join(map(str, values))}" for name, values in dims.items())
            groups.setdefault(key, []).append(file)
        return [(files, list(dims)) for dims, files in groups.items()]

    def write_csv(self) -> str:
        """Return the services as an slo.csv, without unused columns."""
        rows = []
        for name, model in self.models.items():
            row = model.model_dump(exclude_none=True) | {"service": name}
            rows.append(row if model.model is not None else row | {"model": row.pop("file")})
        text = io.StringIO()
        columns = [name for name in PlannedModel.model_fields if any(name in row for row in rows)]
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


class _Loader(yaml.BaseLoader):
    """Reads every value as a text, and refuses repeated keys, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping."""
        keys = [str(key.value) for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.MarkedYAMLError(problem=f"{twice} stands twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=True)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A file with the nodes of its plan, whose lines messages name."""

    path: Path
    root: yaml.Node

    def error(self, where: Sequence[str | int], message: str, fix: str = "") -> InputError:
        """Return an error with the file and the line of the value at ``where``, or of its nearest existing parent."""
        node, line = self.root, self.root.start_mark.line
        for part in where:
            entries: Sequence[tuple[yaml.Node, yaml.Node]] = ()
            if isinstance(node, yaml.MappingNode):
                entries = [(key, value) for key, value in node.value if key.value == str(part)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                entries = [(value, value) for value in node.value[part : part + 1]]
            if not entries:
                break
            line, node = entries[0][0].start_mark.line, entries[0][1]
        return InputError(f"{self.path}:{line + 1}: {message}", fix)


def read_plan(path: Path) -> tuple[PlanFile, RunPlan]:
    """Return a file and its plan.

    Raises `InputError` with the line: no YAML, an unknown key, an impossible value, or no step.
    """
    text = read_input(path, "name a YAML file of steps")
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        content = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), str(getattr(error, "problem", None) or error)
        line = "" if mark is None else f":{mark.line + 1}"
        fix = "leave out the line ---" if "another document" in problem else "indent with spaces, each key once"
        raise InputError(f"{path}{line} is not YAML: {problem}", fix) from None
    if root is None or not isinstance(content, dict):
        raise InputError(f"{path} is no mapping", "it needs steps, as in steps: [doctor]")
    file = PlanFile(path, root)
    try:
        plan = RunPlan.model_validate(content)
    except ValidationError as error:
        raise file.error(*_describe_fault(error.errors()[0])) from None
    for name, model in plan.models.items():
        if model.file is None and model.model is None:
            raise file.error(("models", name), f"{name} has neither a file nor a model", "file: MODEL.onnx")
    return file, plan


def _describe_fault(fault: Any) -> tuple[Sequence[str | int], str, str]:
    """Return the place, the rule and the remedy of pydantic's error."""
    where, what = fault["loc"], fault["msg"]
    if fault["type"] == "extra_forbidden":
        kind = PlannedModel if where[0] == "models" else RunPlan
        error = unknown_name("key", str(where[-1]), list(kind.model_fields))
        return where, error.message, error.fix
    got = "" if isinstance(fault["input"], dict | list) else f" but got {fault['input']!r}"
    fixes = {
        "models": "models: {NAME: {file: MODEL.onnx, rate_rps: 10, slo_ms: 50}}",
        "steps": "steps: [profile, place]",
    }
    return where, f"{'.'.join(map(str, where))}: {what[0].lower()}{what[1:]}{got}", fixes.get(str(where[0]), "")


@dataclass(frozen=True, slots=True)
class StepCommand:
    """A command line of a step."""

    words: tuple[str, ...]  #: Without ``gpuprof``.
    save: Path | None  #: File for the printed output: JSON, CSV or text.
    #: ``inputs``, ``outputs``: Files and folders read and written by the command, as far as its words name them.
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]

    @property
    def line(self) -> str:
        """The command line as typed in a shell."""
        line = f"gpuprof {shlex.join(self.words)}"
        return line if self.save is None else f"{line} > {shlex.quote(str(self.save))}"


class _StepReader:
    """Reads steps in their order, since later ones take the results of earlier ones."""

    def __init__(self, file: PlanFile, plan: RunPlan, group: Any) -> None:
        self._plan, self._file, self._group = plan, file, group
        self._map_file = str(plan.folder / "map.json")
        self._has_database = Path(plan.db).exists()
        self._reported: list[str] = []

    def read_step(self, number: int) -> list[StepCommand]:
        """Return the command lines of a step: what it omits is taken from models and devices.

        Raises `InputError` with the line: an unknown verb or option, an impossible value, or a missing option.
        """
        where: tuple[str | int, ...] = ("steps", number)
        step = self._plan.steps[number]
        if isinstance(step, dict) and len(step) != 1:
            hint = "indent its options by four spaces more than its verb"
            raise self._file.error(where, f"a step is one verb but got {len(step)}", hint)
        text, options = next(iter(step.items())) if isinstance(step, dict) else (step, {})
        if not isinstance(text, str) or not text.strip():
            raise self._file.error(where, "a step is a verb, or a verb with options", "place: {confidence: 0.9}")
        verb, where = text.split(), (*where, text) if isinstance(step, dict) else where
        command = self._find_command(where, verb)
        values = self._read_options(where, options or {}, command)
        save = self._plan.folder / values.pop("save") if "save" in values else None
        commands: list[StepCommand] = []
        for arguments in self._fill_in(where, verb[0], command, values):
            self._check_values(where, verb, command, arguments)
            commands.append(self._make_command(verb, command, arguments, save, commands))
        if verb[0] == "place":
            self._map_file = str(arguments.get("output", self._map_file))
        self._has_database |= verb[0] in _FILLS_DATABASE
        output = arguments.get("output") if save is None else commands[-1].save
        if verb[0] in _REPORTED and output is not None and Path(output).suffix in {".json", ".parquet"}:
            self._reported.append(str(output))
        return commands

    def _find_command(self, where: Sequence[str | int], verb: Sequence[str]) -> Any:
        if verb[0] in _NO_STEPS:
            raise self._file.error(where, f"{verb[0]} is no step of a run", f"gpuprof {verb[0]} by itself")
        command = self._group
        for word in verb:
            inner: Mapping[str, Any] = getattr(command, "commands", {})
            if word not in inner:
                kind = "verb" if command is self._group else f"command of {command.name}"
                error = unknown_name(kind, word, [name for name in inner if name not in _NO_STEPS])
                raise self._file.error(where, error.message, error.fix)
            command = inner[word]
        if inner := getattr(command, "commands", {}):
            fix = ", ".join(f"{command.name} {name}" for name in inner)
            raise self._file.error(where, f"{command.name} has commands of its own", fix)
        return command

    def _read_options(self, where: Sequence[str | int], options: object, command: Any) -> dict[str, Any]:
        """Return the values of a step by the names of parameters, and ``save``: texts, flags, or lists of texts."""
        if not isinstance(options, dict):
            raise self._file.error(where, "expected options, each with its value", f"{command.name}: {{OPTION: VALUE}}")
        parameters = {
            name: parameter
            for parameter in command.params
            for name in {word.lstrip("-") for word in parameter.opts if not word.startswith("-") or word[1] == "-"}
        }
        values: dict[str, Any] = {}
        for name, value in options.items():
            here, texts = (*where, name), value if isinstance(value, list) else [value]
            if name not in {*parameters, "save"}:
                error = unknown_name(f"option of {command.name}", name, [*parameters, "save"])
                raise self._file.error(here, error.message, error.fix)
            if not all(isinstance(text, str) for text in texts):
                raise self._file.error(here, "an option takes a value or a list of values")
            if name == "save":
                if Path(value).suffix not in _SAVED:
                    fix = f"which ends in {', '.join(sorted(_SAVED))}"
                    raise self._file.error(here, "save takes a file", fix)
                values[name] = value
            elif getattr(parameters[name], "is_flag", False):
                if str(value).lower() not in _FLAGS:
                    raise self._file.error(here, f"{name} takes true or false but got {value!r}")
                values[parameters[name].name] = _FLAGS[str(value).lower()]
            elif value not in ("", "~", "null"):
                several = parameters[name].multiple or parameters[name].nargs == -1
                values[parameters[name].name] = texts if several else ",".join(texts)
        return values

    def _fill_in(
        self, where: Sequence[str | int], verb: str, command: Any, values: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the values of each command line: one for each combination of device and sizes that a command takes."""
        plan, names = self._plan, {parameter.name for parameter in command.params}
        usual: dict[str, Any] = {"map_file": self._map_file}
        if self._has_database or verb in _FILLS_DATABASE:
            usual["db"] = plan.db
        if verb in _OF_MODELS:
            usual["models"] = plan.files()
        if verb in _OF_DEMANDS and plan.models:
            for name, model in plan.models.items():
                if missing := [key for key in ("rate_rps", "slo_ms") if getattr(model, key) is None]:
                    message = f"{verb} needs {' and '.join(missing)} of the model {name}"
                    raise self._file.error(where, message, f"{name}: {{rate_rps: 100, slo_ms: 50, …}}")
            usual["slo_file"] = str(plan.folder / "slo.csv")
        if plan.devices:
            usual["gpus"] = ",".join(plan.devices)
        if verb in _RESULTS:
            usual["output"] = str(plan.folder / _RESULTS[verb])
        if verb == "export":
            usual["output"] = str(plan.folder / f"export-{values.get('to', 'tool')}")
        if verb == "report":
            usual["sources"] = [*([plan.db] if self._has_database else []), *self._reported]
        arguments = {name: value for name, value in usual.items() if name in names and value} | dict(values)
        lines = [arguments]
        if verb in _OF_MODELS and "models" not in values and "dim" not in values:
            lines = [
                arguments | {"models": files} | ({"dim": dims} if dims else {}) for files, dims in plan.group_by_dims()
            ] or lines
        kinds = [device.partition(":")[0] for device in plan.devices]
        if verb == "estimate" and "device" not in values and kinds and "any" not in kinds:
            lines = [line | {"device": kind} for line in lines for kind in kinds]
        return lines

    def _check_values(
        self, where: Sequence[str | int], verb: Sequence[str], command: Any, arguments: Mapping[str, Any]
    ) -> None:
        """Refuse values that the command line would refuse, before the first step; outputs are checked when written."""
        # Outputs by their names alone, in the current folder: theirs may be made by an earlier step.
        values = {name: Path(str(value)).name if name in _OUTPUTS else value for name, value in arguments.items()}
        operands, options = _list_words(command, values)
        try:
            context = command.make_context(" ".join(verb), [*options, *operands])
            command.callback.read_values(context.params)
        except GpuprofError as error:
            raise self._file.error(where, error.message, error.fix) from None
        except Exception as error:  # some typer versions copy click: its errors are recognised by their attributes
            if not hasattr(error, "format_message"):
                raise
            fix = f"gpuprof {' '.join(verb)} --help"
            raise self._file.error(where, error.format_message().rstrip("."), fix) from None

    def _make_command(
        self,
        verb: Sequence[str],
        command: Any,
        arguments: Mapping[str, Any],
        save: Path | None,
        before: Sequence[StepCommand],
    ) -> StepCommand:
        if save is not None:
            if verb[0] == "estimate" and len(self._plan.devices) > 1 and "device" in arguments:
                save = save.with_stem(f"{save.stem}-{arguments['device']}")
            if save in [command.save for command in before]:  # models at other sizes
                save = save.with_stem(f"{save.stem}-{len(before) + 1}")
        inputs = [Path(file) for file in self._plan.files()]
        outputs = [] if save is None else [save]
        for name, value in arguments.items():
            (outputs if name in _OUTPUTS else inputs).extend(Path(text) for text in _list_texts(value) if text)
        operands, options = _list_words(command, arguments)
        if save is not None and save.suffix != ".txt":
            options.append(f"--{save.suffix[1:]}")
        return StepCommand((*verb, *operands, *options), save, tuple(inputs), tuple(outputs))


def _list_words(command: Any, arguments: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the operands and the options of a command line."""
    operands: list[str] = []
    options: list[str] = []
    for parameter in command.params:
        value = arguments.get(parameter.name)
        if value is None:
            continue
        if parameter.param_type_name == "argument":
            operands += _list_texts(value)
        elif isinstance(value, bool):
            words = parameter.opts if value else parameter.secondary_opts
            options += [word for word in words if word.startswith("--")][:1]
        else:
            name = next(word for word in parameter.opts if word.startswith("--"))
            options += [word for text in _list_texts(value) for word in (name, text)]
    return operands, options


def _list_texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [] if isinstance(value, bool) else list(value)


def run_steps(path: Path, plan: RunPlan, commands: Sequence[StepCommand], fresh: bool = False) -> int:
    """Run the command lines in order and return the exit code of the last; the first failure ends the run.

    An unstable ``profile`` does not: its times are kept and marked, later steps use them, and the next run measures
    them again. ``fresh``: whether completed steps are run again. Raises `GpuprofError` of the failed step, with a note
    on the step; `UnstableError` at the end, when all steps ran but measured times cannot be trusted; `InputError` when
    the folder of the results cannot be written.
    """
    from gpuprof.cli.main import run_line

    name = path.name
    outputs = {output.absolute() for command in commands for output in command.outputs}
    missing = [file for file in map(Path, plan.files()) if not file.exists() and file.absolute() not in outputs]
    if missing:
        files = f"{', '.join(map(str, missing))}, and no step makes {'it' if len(missing) == 1 else 'them'}"
        raise InputError(f"{path}: no file {files}", "correct file: under models, or add a step such as zoo build")
    state = plan.folder / ".steps.json"
    with refuse_unwritable(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
        if plan.models and all(model.rate_rps and model.slo_ms for model in plan.models.values()):
            (plan.folder / "slo.csv").write_text(plan.write_csv(), encoding="utf-8")
    digests: dict[str, str] = {}
    if not fresh:
        with contextlib.suppress(OSError, ValueError):  # unreadable: every step is run
            digests = dict(json.loads(state.read_text(encoding="utf-8")))
    unstable: list[str] = []
    for number, command in enumerate(commands, start=1):
        where = f"step {number} of {len(commands)}"
        # A command without outputs, such as check, is always run: nothing could have changed unseen.
        if command.outputs and digests.get(command.line) == _hash_files(command):
            say(f"{where}: done before, and nothing that it reads has changed: {command.line}")
            continue
        say(f"{where}: {command.line}")
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output if command.save else sys.stdout):
                code = run_line(command.words)
        except GpuprofError as error:
            if isinstance(error, UnstableError) and command.words[0] == "profile":
                say_note(str(error))
                unstable.append(str(number))
                continue
            error.add_note(f"{where} failed; gpuprof run {name} goes on with it")
            raise
        if code:
            return code
        if command.save:
            with refuse_unwritable(command.save):
                command.save.parent.mkdir(parents=True, exist_ok=True)
                command.save.write_text(output.getvalue(), encoding="utf-8")
        # Afterwards: a step may change its own inputs, as a profile changes the database.
        digests[command.line] = _hash_files(command)
        with refuse_unwritable(state):
            write_atomically(state, json.dumps(digests, indent=1).encode())
    if unstable:
        raise UnstableError(
            f"every step ran, but what step {' and '.join(unstable)} measured is unstable: the machine is too noisy",
            f"gpuprof run {name} measures it again; keep-unstable: true takes it as it is",
        )
    say_note(f"{name}: all {len(commands)} steps succeeded")
    return 0


#: Learned data in a database's hidden folders, on which later steps depend; other hidden folders are copies.
_LEARNT = frozenset({".trained", ".calibrated"})


def _hash_files(command: StepCommand) -> str:
    """Return a digest of gpuprof's version and the files that a command reads and writes."""
    digest = hashlib.sha256(__version__.encode())
    for path in (*command.inputs, *command.outputs):
        for file in sorted(_list_files(path)):
            digest.update(f"{file}\0".encode())
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _list_files(path: Path) -> list[Path]:
    """Return a file, or the files of a folder without hidden folders, except those in `_LEARNT`."""
    files = path.rglob("*") if path.is_dir() else [path]
    return [
        file
        for file in files
        if file.is_file() and not any(part[0] == "." and part not in _LEARNT for part in file.relative_to(path).parts)
    ]
