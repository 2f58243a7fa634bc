"""Machine code is found again by the sources that it was made from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

from gpuprof.machine.machine_code import code_directory, compile_function, is_machine_code_cached

RULE = "LIMIT = 2.0\n\ndef rule(a, b):\n    return a + b * LIMIT\n"
USER = """from made_up_rules.rule import rule

def use(a, b):
    return inner(a) + b

def inner(a):
    return rule(a, 1.0)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a rule and its user, in files that a test may change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "made_up_rules"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "rule.py").write_text(RULE)
    (folder / "user.py").write_text(USER)
    invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.startswith("made_up_rules")]:
        del sys.modules[name]


def test_the_directory_changes_with_the_sources_of_a_callee(package: Path) -> None:
    use = import_module("made_up_rules.user").use
    before = code_directory(use)
    assert code_directory(use) == before
    (package / "rule.py").write_text(RULE.replace("2.0", "3.0"))
    assert code_directory(use) != before


def test_compiled_functions_answer_as_plain_ones_and_are_kept_on_disk(package: Path) -> None:
    use = import_module("made_up_rules.user").use
    assert not is_machine_code_cached(use)
    assert compile_function(use)(4.0, 5.0) == use(4.0, 5.0) == 11.0
    assert is_machine_code_cached(use)
