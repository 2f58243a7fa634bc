"""Runner for the steps of a file, in order, which skips steps whose inputs have not changed since they ran."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from gpuprof import __version__
from gpuprof.cli.output import say, say_note
from gpuprof.cli.plan_file import PlannedModel, RunPlan, StepCommand
from gpuprof.errors import GpuprofError, InputError, UnstableError, refuse_unwritable

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
    done = {} if fresh else _read_done(plan.folder)
    unstable: list[str] = []
    unchanged = 0
    for number, command in enumerate(commands, start=1):
        line, where = show_line(command), f"step {number} of {len(commands)}"
        before = _fingerprint(command.inputs)
        # A command without outputs, such as check, is always run: nothing could have changed unseen.
        if command.outputs and done.get(line) == [__version__, before, _fingerprint(command.outputs)]:
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
        done[line] = [__version__, _fingerprint(command.inputs), _fingerprint(command.outputs)]
        _write_done(plan.folder, done)
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
    made = {output.absolute() for command in commands for output in command.outputs}
    missing = [file for file in plan.files() if not Path(file).exists() and Path(file).absolute() not in made]
    if missing:
        raise InputError(
            f"{path}: no file {', '.join(missing)}, and no step makes {'it' if len(missing) == 1 else 'them'}",
            "correct file: under models, or add a step such as zoo build",
        )


def _run_saved(command: StepCommand) -> int:
    from gpuprof.cli.main import run_line

    assert command.save is not None
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = run_line(command.words)
    with refuse_unwritable(command.save):
        command.save.parent.mkdir(parents=True, exist_ok=True)
        command.save.write_text(printed.getvalue(), encoding="utf-8")
    return code


def write_csv(models: dict[str, PlannedModel]) -> str:
    """Return the services of a plan as an slo.csv."""
    rows = []
    for name, one in models.items():
        row = one.model_dump(exclude_none=True) | {"service": name}
        rows.append(row if one.model is not None else row | {"model": row.pop("file")})
    text = io.StringIO()
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write_demands(plan: RunPlan) -> None:
    with refuse_unwritable(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
        if all(one.rate_rps is not None and one.slo_ms is not None for one in plan.models.values()) and plan.models:
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


def _write_done(folder: Path, done: dict[str, list[str]]) -> None:
    target = _locate_state_file(folder)
    with refuse_unwritable(target):
        # A rename makes the file appear whole: a killed run must not leave half a list.
        part = target.with_suffix(".part")
        part.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
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
            for one in path.iterdir():
                if not one.name.startswith(".") or one.name in _LEARNT:
                    yield from _list_files(one)
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
