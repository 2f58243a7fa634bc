import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from gpuprof.cli import main as cli
from gpuprof.cli.main import build_app, main
from gpuprof.cli.options import complete_devices, complete_models, complete_policies
from gpuprof.errors import InfeasibleError, InputError, UnstableError
from gpuprof.machine.doctor import Finding, Status
from gpuprof.pipeline.doctor import DoctorResult

_UTF8 = os.environ | {"PYTHONIOENCODING": "utf-8"}


def _run_failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def build(verbs: object) -> typer.Typer:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.callback()
        def root() -> None:
            """Fail."""

        @app.command()
        def fail() -> None:
            raise error

        return app

    monkeypatch.setattr(cli, "build_app", build)
    return cli.main(["fail"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("a share must be above 0 but got -1"), 3),
        (UnstableError("the machine is too noisy"), 2),
        (InfeasibleError("no GPU is fast enough"), 1),
        (MemoryError(), 1),
        (ZeroDivisionError("oops"), 99),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_failure_has_its_exit_code_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    assert _run_failing(monkeypatch, error) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("gpuprof: ")


def test_notes_come_before_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = InputError("a share must be above 0 but got -1")
    error.add_note("nothing here can measure a GPU")
    assert _run_failing(monkeypatch, error) == 3
    first, last = capsys.readouterr().err.splitlines()
    assert first == "gpuprof: nothing here can measure a GPU"
    assert "must be above 0" in last


@pytest.mark.parametrize("words", [[], ["zoo"]])
def test_a_group_without_a_verb_shows_its_verbs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    captured = capsys.readouterr()
    assert "Usage: gpuprof" in captured.out and "Commands" in captured.out and captured.err == ""


def test_the_help_names_every_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in cli.VERBS)
    first, _, more = out.partition("More:")
    listed = [line.split()[1] for line in first.partition("Commands")[2].splitlines()[1:] if line.startswith("│")]
    assert listed == [*cli.FIRST_VERBS]
    assert all(verb in more for verbs in cli.MORE_VERBS.values() for verb in verbs)
    build = cli.build_app
    monkeypatch.setattr(cli, "build_app", lambda verbs, names_only=False: build(verbs))
    assert cli.main(["--help"]) == 0
    whole = capsys.readouterr().out
    assert first.partition("Commands")[0] == whole.partition("Commands")[0]  # no option that is left out is missed


def test_the_list_of_verbs_imports_none_of_them() -> None:
    check = "import sys; from gpuprof.cli.main import main; main(['--help'])"
    report = "print(sorted(name for name in sys.modules if name.startswith('gpuprof.cli.')), file=sys.stderr)"
    completed = subprocess.run([sys.executable, "-c", f"{check}; {report}"], capture_output=True, text=True, check=True)
    assert completed.stderr.strip() == "['gpuprof.cli.main', 'gpuprof.cli.options', 'gpuprof.cli.output']"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_terminal_that_lacks_a_letter_gets_its_escape(form: list[str]) -> None:
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    listed = subprocess.run(
        [sys.executable, "-m", "gpuprof", "doctor", *form], env=ascii_only, capture_output=True, check=False
    )
    assert listed.returncode == 0 and listed.stdout.isascii() and b"bug" not in listed.stderr


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    missing = ModuleNotFoundError("No module named 'orjson'", name="orjson")
    assert _run_failing(monkeypatch, missing) == 1
    assert "orjson is not installed (pip install 'gpuprof-onnx[serve]')" in capsys.readouterr().err
    assert _run_failing(monkeypatch, ModuleNotFoundError("No module named 'nowhere'", name="nowhere")) == 99


@pytest.mark.parametrize("words", [["--help"], ["zoo", "list"]])
def test_a_full_disk_behind_the_output_is_told_in_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        completed = subprocess.run(
            [sys.executable, "-m", "gpuprof", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (completed.returncode, completed.stderr) == (1, "gpuprof: cannot write: No space left on device\n")


def test_text_that_a_library_prints_to_descriptor_1_does_not_reach_the_results() -> None:
    code = (
        "import os, sys\n"
        "from gpuprof.cli import main\n"
        "main.main = lambda: (os.write(1, b'banner\\n'), sys.stdout.write('result é\\n'), 0)[-1]\n"
        "main.console_script()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=_UTF8)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "result é\n", "banner\n")


#: Words that need what stands before them, which a line of help does not have.
_LEANING = set(
    re.findall(
        r"\w+",
        "a an and another as at but by else from how if in instead into it its like not of on or so than that the "
        "their then these they this those times to when where which with without what who why",
    )
)


def _lines(command: Any, path: str) -> Iterator[tuple[str, str]]:
    yield path, (command.help or "").split("\n\n")[0].replace("\n", " ")
    for parameter in command.params:
        if parameter.name != "help":
            yield f"{path} {parameter.opts[0]}", getattr(parameter, "help", None) or ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _lines(inner, f"{path} {name}")


LINES = sorted(set(_lines(typer.main.get_command(build_app()), "gpuprof")))


@pytest.mark.parametrize(("where", "line"), LINES, ids=[where for where, _ in LINES])
def test_every_line_of_help_stands_alone(where: str, line: str) -> None:
    assert line, f"{where} has no help"
    first = re.match(r"[^\s,:;.]+", line)
    assert first is not None and (first[0][0].isupper() or first[0] == "gRPC"), line
    assert first[0].lower() not in _LEANING, f"{line!r} leans on what is not there"
    assert line.endswith(".") and not line.endswith(".."), line
    assert "(s)" not in line and "unless given" not in line


@pytest.mark.parametrize("group", ["db", "trace", "zoo"])
def test_no_list_of_commands_cuts_what_is_said_of_one(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group, "--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands")[2]
    assert len(listed.strip().splitlines()) > 1 and "…" not in listed


def _commands(command: Any) -> Iterator[Any]:
    inner = getattr(command, "commands", {})
    yield from () if inner else (command,)
    for subcommand in inner.values():
        yield from _commands(subcommand)


def test_every_command_refuses_an_option_of_one_value_that_is_given_twice() -> None:
    commands = list(_commands(typer.main.get_command(build_app())))
    assert len(commands) > 30
    for command in commands:
        taken = [
            parameter for parameter in command.params if parameter.param_type_name == "option" and not parameter.is_flag
        ]
        for option in taken:
            words = [word for value in ("1", "2") for word in (option.opts[-1], value)]
            if option.multiple:
                continue
            with pytest.raises(InputError, match=f"{max(option.opts, key=len)} is given 2 times"):
                command.parse_args(command.context_class(command, info_name=command.name), words)


def _complete(words: str, folder: Path, **environment: str) -> list[str]:
    variables: Mapping[str, str] = {
        **os.environ,
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - (not words.endswith(" "))),
        "_GPUPROF_COMPLETE": "complete_bash",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **environment,
    }
    command = [sys.executable, "-m", "gpuprof"]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True).stdout.split()


def test_a_shell_completes_devices(tmp_path: Path) -> None:
    assert "a100-80" in _complete("gpuprof estimate --device a100", tmp_path)


def test_the_last_of_several_is_completed() -> None:
    assert "v100,h200" in complete_devices("v100,h20")
    assert "ffd,parvagpu" in complete_policies("ffd,parva")


def test_onnx_files_and_folders_are_completed_without_a_database(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPROF_DB", str(here / "none"))
    (here / "models").mkdir()
    for name in ("net.onnx", "notes.txt", "models/other.onnx"):
        (here / name).touch()
    assert complete_models("") == ["models/", "net.onnx"]
    assert complete_models("models/") == ["models/other.onnx"]
    assert complete_models("nowhere/") == []


def finding(name: str, status: Status = Status.OK) -> Finding:
    return Finding("topic", name, status, "detail")


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        (
            ["ONNX Runtime", "extra cpu", "extra serve"],
            "profile, estimate, place and serve on the CPU; no NVIDIA driver.",
        ),
        (
            ["GPU 0", "GPU 1", "extra gpu", "extra serve", "ONNX Runtime"],
            "profile, estimate, place and serve on 2 GPUs and the CPU.",
        ),
        (
            ["GPU 0", "ONNX Runtime"],
            "profile, estimate and place on the CPU; no server: the extra serve is missing; GPUs need the extra gpu.",
        ),
        (
            ["extra serve"],
            "estimate, place and serve; no ONNX Runtime, which profile and estimates of GPUs need; no NVIDIA driver.",
        ),
    ],
)
def test_the_verdict_names_what_works_and_where(findings: list[str], verdict: str) -> None:
    absent = finding("Ray", Status.MISSING)
    assert DoctorResult(findings=(*map(finding, findings), absent)).verdict() == verdict


def test_doctor_begins_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("This machine can ")
