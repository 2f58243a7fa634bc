from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuprof.domain.input_file import refuse_pipe
from gpuprof.errors import InputError


def test_files_and_what_is_missing_are_left_to_whoever_opens_them(tmp_path: Path) -> None:
    file = tmp_path / "slo.csv"
    file.touch()
    for path in (file, tmp_path, tmp_path / "missing", Path("a\0b")):
        assert refuse_pipe(path) is path


def test_named_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"it is a named pipe, which may never end \(give the path of a file\)"):
        refuse_pipe(tmp_path / "pipe")
    with pytest.raises(InputError, match="it is a device"):
        refuse_pipe(Path("/dev/zero"))


def test_a_pipe_that_the_shell_made_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"model,rate_rps,slo_ms\n")
    os.close(writing)
    try:
        assert refuse_pipe(Path(f"/dev/fd/{reading}")).read_text() == "model,rate_rps,slo_ms\n"
    finally:
        os.close(reading)
