"""An output that cannot be written is refused before the work whose result it is to hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.cli.options import check_output_file, check_output_folder
from gpuprof.errors import InputError

#: Verbs with inputs that are missing, so that the message tells which was looked at first.
_FILES = [
    ["place", "--slo-file", "none.csv", "-o"],
    ["merge", "a.onnx", "b.onnx", "-o"],
    ["report", "none", "-o"],
    ["simulate", "none.json", "-o"],
    ["load", "http://127.0.0.1:9", "-o"],
    ["zoo", "build", "nothing", "-o"],
    ["zoo", "rebatch", "none.onnx", "-o"],
    ["trace", "make", "--rate", "m=-1", "-o"],
]


@pytest.mark.parametrize("words", _FILES, ids=lambda words: " ".join(words[:2]))
def test_every_verb_looks_at_its_output_first(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(tmp_path / "missing" / "out.json")]) == 3
    stderr = capsys.readouterr().err
    assert f"{tmp_path / 'missing'} does not exist (name a file in a directory that exists)" in stderr


def test_a_directory_is_no_file_and_what_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="it is a directory"):
        check_output_file(tmp_path)
    assert check_output_file(tmp_path / "new") == tmp_path / "new"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for check in (check_output_file, check_output_folder):
        with pytest.raises(InputError, match="permission denied"):
            check(tmp_path / "new")
