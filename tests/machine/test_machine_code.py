"""Machine code is found again by all sources that it was made from, and by nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gpuprof.machine.machine_code import (
    _read_source,
    code_directory,
    compile_function,
    compile_with_callees,
    is_machine_code_cached,
)

RULE = "LIMIT = 2.0\n\ndef rule(a, b):\n    return a + b * LIMIT\n"
USER = """from gpuprof_made_up.rule import rule

def use(a, b):
    return rule(a, b) + inner(a)

def inner(a):
    return 0.0
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose functions count as this one's, in files that tests may change."""
    monkeypatch.setattr("gpuprof.machine.machine_code._PACKAGE", "gpuprof_made_up")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "gpuprof_made_up"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "rule.py").write_text(RULE)
    (folder / "user.py").write_text(USER)
    yield folder
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("gpuprof_made_up")]:
        del sys.modules[name]
    _read_source.cache_clear()
    importlib.invalidate_caches()


def load(folder: Path, name: str, text: str | None = None) -> ModuleType:
    """Import the package's module ``user`` anew, with another text in the file ``name``."""
    forget()
    if text is not None:
        (folder / f"{name}.py").write_text(text)
    return importlib.import_module("gpuprof_made_up.user")


def test_another_source_of_what_is_called_is_another_directory(package: Path) -> None:
    texts = [RULE, RULE.replace("+", "-"), RULE.replace("2.0", "3.0"), RULE.replace("(a, b)", "(a, b, c=0.0)")]
    seen = [code_directory(load(package, "rule", text).use) for text in texts]
    assert len(set(seen)) == len(texts)
    assert code_directory(load(package, "rule", RULE).use) == seen[0]
    assert code_directory(load(package, "user", USER.replace("0.0", "1.0")).use) not in seen


def test_a_number_that_was_imported_alone_counts_too(package: Path) -> None:
    user = "from gpuprof_made_up.rule import LIMIT\n\ndef use(a):\n    return a * LIMIT\n"
    seen = {code_directory(load(package, "user", user).use)}
    seen.add(code_directory(load(package, "rule", RULE.replace("2.0", "2.5")).use))
    assert len(seen) == 2


def test_a_function_is_compiled_with_all_that_it_calls_and_stays_plain_itself(package: Path) -> None:
    use = load(package, "user").use
    plain = use(1.0, 3.0)
    assert not is_machine_code_cached(use)
    compiled = compile_with_callees(use)
    assert compiled(1.0, 3.0) == plain == 7.0
    assert hasattr(compiled, "py_func") and not hasattr(use, "py_func")
    assert is_machine_code_cached(use)


def test_machine_code_is_loaded_where_nothing_changed_and_compiled_where_something_did(package: Path) -> None:
    compile_with_callees(load(package, "user").use)(1.0, 3.0)
    again = compile_with_callees(load(package, "user").use)
    assert again(1.0, 3.0) == 7.0 and sum(again.stats.cache_hits.values()) == 1
    changed = compile_with_callees(load(package, "rule", RULE.replace("2.0", "4.0")).use)
    assert changed(1.0, 3.0) == 13.0 and not changed.stats.cache_hits


def test_without_a_writable_directory_it_is_compiled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_function(_add_one)(2.0) == 3.0
    assert not is_machine_code_cached(_add_one)


def _add_one(value: float) -> float:
    return value + 1.0
