from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpuprof.domain.file_access import refuse_pipe, refuse_to_replace, write_atomically
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


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "map.json"
    write_atomically(file, b"first")
    assert file.read_bytes() == b"first" and file.stat().st_mode & 0o777 == 0o644
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(file, b"second")
    assert file.read_bytes() == b"first" and list(tmp_path.iterdir()) == [file]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, b"a map")
        assert pipe.is_fifo() and os.read(reading, 100) == b"a map"
    finally:
        os.close(reading)


def test_a_link_goes_on_leading_to_the_file_that_was_written(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("map.json")
    for content in (b"first", b"second"):
        write_atomically(tmp_path / "link.json", content)
        assert (tmp_path / "link.json").is_symlink() and (tmp_path / "map.json").read_bytes() == content


def test_nothing_takes_the_place_of_a_device(tmp_path: Path) -> None:
    for path in (tmp_path / "new.onnx", tmp_path):
        assert refuse_to_replace(path) is path
    for path in (Path("/dev/null"), Path("/dev/full")):
        with pytest.raises(InputError, match=f"cannot write {path}: it is a device"):
            refuse_to_replace(path)
