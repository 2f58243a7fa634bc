"""What all tests share: how hypothesis behaves on machines that are busy, and which tests may be tried again."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.command_line import CommandLine

# Nothing asserts on wall-clock time, and hypothesis does so unless told otherwise. The same examples are drawn each
# time, so that a change fails for what it changed; HYPOTHESIS_SEARCH=1 draws others, to find what nobody thought of.
settings.register_profile(
    "unhurried",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("HYPOTHESIS_SEARCH"),
)
settings.load_profile("unhurried")

# No test, and no program that one starts, reads or writes a database of the user.
for _variable in ("GPUPROF_DB", "SOURCE_DATE_EPOCH"):
    os.environ.pop(_variable, None)

#: What `make check FAST=1` gives pytest.
QUICK = "not slow and not flaky"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty directory, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which `QUICK` leaves out every test: importing them takes each process seconds."""
    if config.getoption("markexpr") != QUICK or collection_path.suffix != ".py":
        return None
    from tests import reruns

    text = collection_path.read_text(encoding="utf-8")
    marks = re.search(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", text, re.MULTILINE | re.DOTALL)
    named = (name for name, mark in vars(reruns).items() if isinstance(mark, pytest.MarkDecorator))
    return True if marks and any(word in marks[1] for word in ("pytest.mark.slow", *named)) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse reruns that no reason is given for; properties that hypothesis draws are never tried again.

    Where tests run in several processes, each begins with its part of the slow ones: else one of minutes that begins
    last leaves all other processes idle.

    Raises
    ------
    pytest.UsageError
        For a mark ``flaky`` without ``reason``.
    """
    for item in items:
        mark = item.get_closest_marker("flaky")
        if mark is None:
            continue
        if not str(mark.kwargs.get("reason") or "").strip():
            raise pytest.UsageError(f"{item.nodeid} is marked flaky without a reason: see tests/reruns.py")
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):  # a counterexample is one
            item.add_marker(pytest.mark.flaky(reruns=0, reason="a counterexample is not tried again"), append=False)
    if hasattr(config, "workerinput"):
        items[:] = deal_slow_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how each test failed that was tried again: a run that passes with one is not as good as one without."""
    reports = terminalreporter.stats.get("rerun", [])
    if reports:
        terminalreporter.section("failed and tried again", yellow=True)
    for report in reports:
        terminalreporter.line(f"{report.nodeid} ({report.when})", yellow=True, bold=True)
        terminalreporter.line(report.longreprtext)


def deal_slow_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the items so that each of ``workers`` equal parts begins with slow ones, dealt in turn.

    ``--dist worksteal`` gives each process such a part. Slow tests of a file that share a fixture stay together.
    """
    groups: dict[object, list[pytest.Item]] = {}
    quick: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("slow") is None:
            quick.append(item)
        else:
            groups.setdefault(item.path if _shares_fixture(item) else item.nodeid, []).append(item)
    dealt: list[pytest.Item] = []
    in_turn = list(groups.values())
    for worker in range(workers):
        part = (len(items) - len(dealt)) // (workers - worker)
        slow = [item for group in in_turn[worker::workers] for item in group]
        fill = max(0, part - len(slow))
        dealt += [*slow, *quick[:fill]]
        quick = quick[fill:]
    return dealt + quick


def _shares_fixture(item: pytest.Item) -> bool:
    fixtures = getattr(item, "_fixtureinfo", None)
    definitions = (
        () if fixtures is None else [definition for many in fixtures.name2fixturedefs.values() for definition in many]
    )
    return any(
        definition.scope != "function" and definition.baseid and definition.baseid in item.nodeid
        for definition in definitions
    )
