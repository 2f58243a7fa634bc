from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.errors import InputError, refuse_unwritable


def test_what_the_system_says_against_writing_is_an_error_of_the_input(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "map.json"
    with pytest.raises(InputError) as raised, refuse_unwritable(path, "make the folder first"):
        path.write_text("")
    assert str(raised.value) == f"cannot write {path}: No such file or directory (make the folder first)"


def test_other_errors_and_no_error_pass() -> None:
    with pytest.raises(KeyError), refuse_unwritable("map.json"):
        raise KeyError("model")
    with refuse_unwritable("map.json"):
        pass
