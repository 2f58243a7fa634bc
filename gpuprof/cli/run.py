"""``gpuprof run``: run a whole plan from one file that can be committed."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gpuprof import __version__
from gpuprof.cli.config_file import YamlFile, list_options, read_options, read_yaml
from gpuprof.cli.output import say, say_note
from gpuprof.domain.sizes import parse_mix
from gpuprof.errors import GpuprofError, InputError, UnstableError, refuse_unwritable, unknown_name


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

    plan, file = read_plan(plan_file)
    with _folder(plan_file.absolute().parent):  # relative paths start at the file's folder
        commands = list_commands(plan, file, typer.main.get_command(build_app()))
        if dry_run:
            if plan.models:
                sys.stdout.write(f"# {plan.folder / 'slo.csv'}:\n")
                sys.stdout.write("".join(f"#   {line}\n" for line in write_csv(plan.models).splitlines()))
            sys.stdout.write("".join(f"{show_line(command)}\n" for command in commands))
            return
        if code := run_steps(plan_file, plan, commands, fresh):
            raise typer.Exit(code)


def _folder(path: Path) -> contextlib.chdir[Path]:
    if not path.is_dir():
        raise InputError(f"{path} is no folder", "name the folder that the plan stands in")
    return contextlib.chdir(path)


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
_OUTPUTS = frozenset({"output", "figures", "picture"})
#: Verbs whose results a report shows by default.
_REPORTED = frozenset({"place", "simulate", "evaluate", "load"})

_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlannedModel(_Part):
    """A service: its model as a file, or by its name in the database, and its demand, as in slo.csv."""

    file: str | None = None
    model: str | None = None
    rate_rps: _Positive | None = None
    slo_ms: _Positive | None = None
    percentile: Annotated[float, Field(ge=1.0, le=99.999)] | None = None
    min_goodput_rps: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    priority: int | None = None
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    dims: str | None = None

    def steps(self) -> list[str]:
        """Return the files: those of the steps of a chain, or that of the model, if it has one."""
        return [] if self.file is None else [step.strip() for step in self.file.split(">")]


def _as_list(value: object) -> object:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class RunPlan(_Part):
    """A whole run: services by name, devices as ``--gpus`` has them, database, folder of results, steps."""

    models: dict[str, PlannedModel] = Field(default_factory=dict)
    devices: Annotated[list[str], BeforeValidator(_as_list)] = Field(default_factory=list)
    db: str = "gpuprof-db"
    folder: Path = Path("gpuprof-run")
    steps: Any = None

    def files(self) -> list[str]:
        """Return the models' files, each once."""
        return list(dict.fromkeys(file for model in self.models.values() for file in model.steps()))

    def group_by_dims(self) -> list[tuple[list[str], list[str]]]:
        """Return the models' files by the sizes that their requests have, as ``--dim`` takes them."""
        sizes: dict[str, dict[str, dict[int, None]]] = {file: {} for file in self.files()}
        for model in self.models.values():
            if model.dims is not None:
                for part, _ in parse_mix(model.dims).parts:
                    for (name, size), file in product(part, model.steps()):
                        sizes[file].setdefault(name, {})[size] = None
        groups: dict[tuple[str, ...], list[str]] = {}
        for file, dims in sizes.items():
            key = tuple(f"{name}={','.join(map(str, values))}" for name, values in dims.items())
            groups.setdefault(key, []).append(file)
        return [(files, list(dims)) for dims, files in groups.items()]


@dataclass(frozen=True, slots=True)
class StepCommand:
    """A command line of a step."""

    words: tuple[str, ...]  #: Without ``gpuprof``.
    save: Path | None  #: File for the printed output: JSON, CSV or text.
    #: ``inputs``, ``outputs``: Files and folders read and written by the command, as far as its words name them.
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]


def read_plan(path: Path) -> tuple[RunPlan, YamlFile]:
    """Return the plan in a file, and the file.

    Raises `InputError` with the line: no YAML, an unknown key, an impossible value, or no step.
    """
    file = read_yaml(path, "steps")
    if file.content is None:
        raise InputError(f"{path} is empty", "it needs steps, as in steps: [doctor]")
    if not isinstance(file.content, dict):
        raise file.error((), InputError("the file is no mapping", "it needs steps, as in steps: [doctor]"))
    try:
        plan = RunPlan.model_validate(file.content)
    except ValidationError as error:
        raise _describe(file, error.errors()[0]) from None
    for name, model in plan.models.items():
        if model.file is None and model.model is None:
            message = f"{name} has neither a file nor a model"
            raise file.error(("models", name), InputError(message, "file: MODEL.onnx"))
    if not isinstance(plan.steps, list) or not plan.steps:
        raise file.error(("steps",), InputError("steps must be a list of verbs", "steps: [profile, place]"))
    return plan, file


def _describe(file: YamlFile, error: Any) -> InputError:
    where = error["loc"]
    if error["type"] == "extra_forbidden":
        kind = PlannedModel if where[0] == "models" else RunPlan
        return file.error(where, unknown_name("key", str(where[-1]), list(kind.model_fields)))
    what = error["msg"].replace("a valid dictionary", "names with their values")
    got = "" if isinstance(error["input"], dict | list) else f" but got {error['input']!r}"
    fix = "as in models: {NAME: {file: MODEL.onnx, rate_rps: 10, slo_ms: 50}}" if where[0] == "models" else ""
    name = ".".join(map(str, where))
    return file.error(where, InputError(f"{name}: {what[0].lower()}{what[1:]}{got}", fix))


def list_commands(plan: RunPlan, file: YamlFile, group: Any) -> list[StepCommand]:
    """Return the command lines of a plan, in their order: what a step omits is taken from models and devices.

    ``group``: click group of all verbs. Raises `InputError` with the line: an unknown verb or option, an impossible
    value, or a missing option.
    """
    reader = _StepReader(plan, file, group)
    return [command for number in range(len(plan.steps)) for command in reader.read_step(number)]


class _StepReader:
    """Reads steps in their order, since later ones take the results of earlier ones."""

    def __init__(self, plan: RunPlan, file: YamlFile, group: Any) -> None:
        self._plan, self._file, self._group = plan, file, group
        self._map_file = str(plan.folder / "map.json")
        self._has_database = Path(plan.db).exists()
        self._reported: list[str] = []

    def read_step(self, number: int) -> list[StepCommand]:
        """Return the command lines of a step."""
        where: tuple[str | int, ...] = ("steps", number)
        step = self._plan.steps[number]
        if isinstance(step, dict) and len(step) != 1:
            hint = "indent its options by four spaces more than its verb"
            raise self._file.error(where, InputError(f"a step is one verb but got {len(step)}", hint))
        text, options = next(iter(step.items())) if isinstance(step, dict) else (step, {})
        if not isinstance(text, str) or not text.strip():
            fix = "place: {confidence: 0.9}"
            raise self._file.error(where, InputError("a step is a verb, or a verb with options", fix))
        verb, where = text.split(), (*where, text) if isinstance(step, dict) else where
        command = self._find_command(where, verb)
        values = read_options(self._file, where, options or {}, command, ("save",))
        save = self._read_save(where, (options or {}).get("save"))
        commands: list[StepCommand] = []
        for arguments in self._fill_in(where, verb[0], command, values):
            self._check_values(where, verb, command, arguments)
            commands.append(self._make_command(verb, command, arguments, save, commands))
        if verb[0] == "place":
            self._map_file = str(arguments.get("output", self._map_file))
        self._has_database |= verb[0] in _FILLS_DATABASE
        output = arguments.get("output") if save is None else str(commands[-1].save)
        if verb[0] in _REPORTED and output is not None and Path(str(output)).suffix in {".json", ".parquet"}:
            self._reported.append(str(output))
        return commands

    def _find_command(self, where: Sequence[str | int], verb: Sequence[str]) -> Any:
        if verb[0] in _NO_STEPS:
            raise self._file.error(where, InputError(f"{verb[0]} is no step of a run", f"gpuprof {verb[0]} by itself"))
        command = self._group
        for word in verb:
            inner: Mapping[str, Any] = getattr(command, "commands", {})
            if word not in inner:
                kind = "verb" if command is self._group else f"command of {command.name}"
                names = [name for name in inner if name not in _NO_STEPS]
                raise self._file.error(where, unknown_name(kind, word, names))
            command = inner[word]
        if inner := getattr(command, "commands", {}):
            fix = ", ".join(f"{command.name} {name}" for name in inner)
            raise self._file.error(where, InputError(f"{command.name} has commands of its own", fix))
        return command

    def _read_save(self, where: Sequence[str | int], save: object) -> Path | None:
        if save is None or (isinstance(save, str) and Path(save).suffix in _SAVED):
            return None if save is None else self._plan.folder / str(save)
        fix = f"which ends in {', '.join(sorted(_SAVED))}"
        raise self._file.error((*where, "save"), InputError("save takes a file", fix))

    def _fill_in(
        self, where: Sequence[str | int], verb: str, command: Any, values: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the values of each command line: one for each device and sizes where a command takes one."""
        plan, names = self._plan, {parameter.name for parameter in command.params}
        usual: dict[str, Any] = {"map_file": self._map_file}
        if self._has_database or verb in _FILLS_DATABASE:
            usual["db"] = plan.db
        if verb in _OF_MODELS:
            usual["models"] = plan.files()
        if verb in _OF_DEMANDS and plan.models:
            self._check_demands(where, verb)
            usual["slo_file"] = str(plan.folder / "slo.csv")
        if plan.devices and "fleet" not in values:
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

    def _check_demands(self, where: Sequence[str | int], verb: str) -> None:
        for name, model in self._plan.models.items():
            missing = [key for key in ("rate_rps", "slo_ms") if getattr(model, key) is None]
            if missing:
                message = f"{verb} needs {' and '.join(missing)} of the model {name}"
                raise self._file.error(where, InputError(message, f"{name}: {{rate_rps: 100, slo_ms: 50, …}}"))

    def _check_values(
        self, where: Sequence[str | int], verb: Sequence[str], command: Any, arguments: Mapping[str, Any]
    ) -> None:
        """Refuse values that the command line would refuse, before the first step; outputs are checked when written."""
        # Outputs by their names alone, in the current folder: theirs may be made by an earlier step.
        values = {name: Path(str(value)).name if name in _OUTPUTS else value for name, value in arguments.items()}
        operands, options = _list_words(command, values)
        try:
            command.make_context(" ".join(verb), [*options, *operands])
        except GpuprofError as error:
            raise self._file.error(where, InputError(error.message, error.fix)) from None
        except Exception as error:  # some typer versions copy click: its errors are recognised by their attributes
            if not hasattr(error, "format_message"):
                raise
            name = getattr(getattr(error, "param", None), "name", None)
            option = next((key for key, parameter in list_options(command).items() if parameter.name == name), "")
            wrong = InputError(error.format_message().rstrip("."), f"gpuprof {' '.join(verb)} --help")
            raise self._file.error((*where, option), wrong) from None

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


#: Learned data in a database's hidden folders, on which later steps depend; other hidden folders are copies.
_LEARNT = frozenset({".trained", ".calibrated"})
#: Columns of slo.csv, in this order; unused columns are omitted.
_COLUMNS = (
    *("model", "rate_rps", "slo_ms", "service", "file"),
    *("percentile", "min_goodput_rps", "priority", "max_replicas", "dims"),
)


def show_line(command: StepCommand) -> str:
    """Return a command line as typed in a shell."""
    line = f"gpuprof {shlex.join(command.words)}"
    return line if command.save is None else f"{line} > {shlex.quote(str(command.save))}"


def run_steps(path: Path, plan: RunPlan, commands: Sequence[StepCommand], fresh: bool = False) -> int:
    """Run the command lines in order and return the exit code of the last; the first failure ends the run.

    An unstable ``profile`` does not: its times are kept and marked, later steps use them, and the next run measures
    them again. ``fresh``: whether completed steps are run again. Raises `GpuprofError` of the failed step, with a note
    on the step; `UnstableError` at the end, when all steps ran but measured times cannot be trusted; `InputError` when
    the folder of the results cannot be written.
    """
    from gpuprof.cli.main import run_line

    _require_files(path, plan, commands)
    _write_demands(plan)
    fingerprints = {} if fresh else _read_done(plan.folder)
    unstable: list[str] = []
    unchanged = 0
    for number, command in enumerate(commands, start=1):
        line, where = show_line(command), f"step {number} of {len(commands)}"
        before = _fingerprint(command.inputs)
        # A command without outputs, such as check, is always run: nothing could have changed unseen.
        if command.outputs and fingerprints.get(line) == [__version__, before, _fingerprint(command.outputs)]:
            unchanged += 1
            say(f"{where}: done before, and nothing that it reads has changed: {line}")
            continue
        say(f"{where}: {line}")
        try:
            code = _run_saved(command) if command.save is not None else run_line(command.words)
        except GpuprofError as error:
            if isinstance(error, UnstableError) and command.words[0] == "profile":
                say_note(str(error))
                unstable.append(str(number))
                continue
            error.add_note(f"{where} failed; gpuprof run {path.name} goes on with it")
            raise
        if code:
            return code
        # The fingerprint is taken afterwards: a step may change its own inputs, as a profile changes the database.
        fingerprints[line] = [__version__, _fingerprint(command.inputs), _fingerprint(command.outputs)]
        _write_done(plan.folder, fingerprints)
    if unstable:
        raise UnstableError(
            f"every step ran, but what step {' and '.join(unstable)} measured is unstable: the machine is too noisy",
            f"gpuprof run {path.name} measures it again; keep-unstable: true takes it as it is",
        )
    again = f", {unchanged} of them unchanged" if unchanged else ""
    say_note(f"{path.name}: all {len(commands)} steps succeeded{again}")
    return 0


def _require_files(path: Path, plan: RunPlan, commands: Sequence[StepCommand]) -> None:
    """Refuse a run, before its first step, when a model file is missing and no step makes it."""
    outputs = {output.absolute() for command in commands for output in command.outputs}
    missing = [file for file in plan.files() if not Path(file).exists() and Path(file).absolute() not in outputs]
    if missing:
        raise InputError(
            f"{path}: no file {', '.join(missing)}, and no step makes {'it' if len(missing) == 1 else 'them'}",
            "correct file: under models, or add a step such as zoo build",
        )


def _run_saved(command: StepCommand) -> int:
    from gpuprof.cli.main import run_line

    assert command.save is not None
    output = io.StringIO()
    with redirect_stdout(output):
        code = run_line(command.words)
    with refuse_unwritable(command.save):
        command.save.parent.mkdir(parents=True, exist_ok=True)
        command.save.write_text(output.getvalue(), encoding="utf-8")
    return code


def write_csv(models: dict[str, PlannedModel]) -> str:
    """Return the services of a plan as an slo.csv."""
    rows = []
    for name, model in models.items():
        row = model.model_dump(exclude_none=True) | {"service": name}
        rows.append(row if model.model is not None else row | {"model": row.pop("file")})
    text = io.StringIO()
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write_demands(plan: RunPlan) -> None:
    with refuse_unwritable(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
        if (
            all(model.rate_rps is not None and model.slo_ms is not None for model in plan.models.values())
            and plan.models
        ):
            (plan.folder / "slo.csv").write_text(write_csv(plan.models), encoding="utf-8")


def _locate_state_file(folder: Path) -> Path:
    return folder / ".steps.json"


def _read_done(folder: Path) -> dict[str, list[str]]:
    """Return the record of completed steps; empty where the record cannot be read."""
    try:
        content = json.loads(_locate_state_file(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_done(folder: Path, fingerprints: dict[str, list[str]]) -> None:
    target = _locate_state_file(folder)
    with refuse_unwritable(target):
        # A rename makes the file appear whole: a killed run must not leave half a list.
        part = target.with_suffix(".part")
        part.write_text(json.dumps(fingerprints, indent=1) + "\n", encoding="utf-8")
        part.replace(target)


def _fingerprint(paths: Sequence[Path]) -> str:
    """Return a digest of the files below the paths; a missing path changes the digest."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(_list_files(path)):
            digest.update(f"{file}\0".encode())
            digest.update(_describe_file(file))
        # A separator between paths: without it "ab" and "c" would equal "a" and "bc".
        digest.update(b"\0")
    return digest.hexdigest()


def _list_files(path: Path) -> Iterator[Path]:
    try:
        if path.is_dir():
            for entry in path.iterdir():
                if not entry.name.startswith(".") or entry.name in _LEARNT:
                    yield from _list_files(entry)
        elif path.is_file():
            yield path
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def _describe_file(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    except OSError:
        return b"gone"
