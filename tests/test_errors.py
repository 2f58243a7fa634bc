from pathlib import Path

import pytest

from gpuprof.errors import InputError, refuse_unwritable, unknown_name


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


def test_a_name_that_is_known_twice_is_suggested_once() -> None:
    assert unknown_name("model", "resnet5", ["resnet50", "resnet50"]).fix == "did you mean resnet50?"
