"""Which tests are tried again: those marked with a reason, and never what hypothesis draws."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run_tests(tmp_path: Path, code: str) -> tuple[int, str]:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path / "conftest.py")
    (tmp_path / "test_it.py").write_text(code)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    return completed.returncode, completed.stdout + completed.stderr


_FAILS_ONCE = """
import pytest
from pathlib import Path

MARK
def test_it():
    tried = Path(__file__).with_name("tried")
    if not tried.exists():
        tried.touch()
        raise AssertionError("the first time")
"""


def test_a_mark_with_a_reason_has_the_test_tried_again_and_its_failure_shown(tmp_path: Path) -> None:
    code = _FAILS_ONCE.replace("MARK", "@pytest.mark.flaky(reruns=1, reason='waits by the clock')")
    status, output = run_tests(tmp_path, code)
    assert status == 0, output
    assert "1 rerun" in output
    assert "failed and tried again" in output and "AssertionError: the first time" in output


def test_what_is_not_marked_fails_the_first_time(tmp_path: Path) -> None:
    status, output = run_tests(tmp_path, _FAILS_ONCE.replace("MARK", ""))
    assert status == 1, output
    assert "rerun" not in output and "tried again" not in output


@pytest.mark.slow
def test_a_mark_without_a_reason_is_refused(tmp_path: Path) -> None:
    for mark in ("@pytest.mark.flaky(reruns=1)", "@pytest.mark.flaky(reruns=1, reason=' ')"):
        status, output = run_tests(tmp_path, _FAILS_ONCE.replace("MARK", mark))
        assert status == 4, output
        assert "test_it is marked flaky without a reason" in output


@pytest.mark.slow
def test_a_counterexample_is_not_tried_again(tmp_path: Path) -> None:
    code = (
        "import pytest\nfrom hypothesis import given, strategies\n"
        "pytestmark = pytest.mark.flaky(reruns=3, reason='waits by the clock')\n"
        "@given(strategies.integers())\ndef test_it(n):\n    assert n < 100\n"
    )
    status, output = run_tests(tmp_path, code)
    assert status == 1, output
    assert "rerun" not in output
