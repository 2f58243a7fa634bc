from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from gpuprof.cli import main as cli
from gpuprof.errors import InfeasibleError, InputError, UnstableError

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


def test_what_was_remarked_before_a_failure_is_printed_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = InputError("a share must be above 0 but got -1")
    error.add_note("nothing here can measure a GPU")
    assert _run_failing(monkeypatch, error) == 3
    first, last = capsys.readouterr().err.splitlines()
    assert first == "gpuprof: nothing here can measure a GPU"
    assert "must be above 0" in last


@pytest.mark.parametrize("words", [[], ["zoo"]])
def test_what_has_verbs_of_its_own_shows_them_where_none_is_given(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_library_of_an_extra_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
