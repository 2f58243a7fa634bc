"""Processes that take turns run one at a time, first come, first served, whoever of them dies."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from gpuprof.serving.worker.turn import open_turns
from tests.serving.running import eventually

_FORK = get_context("fork")


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def _take_turns(log: Path, name: str, times: int, asks: Any, ends: Any) -> None:
    with open_turns("group") as turn, log.open("a") as file:
        asks.wait()
        for _ in range(times):
            with turn:
                os.write(file.fileno(), f"{name} {turn._number} in\n".encode())
                time.sleep(0.002)
                os.write(file.fileno(), f"{name} {turn._number} out\n".encode())
        ends.wait()


def test_one_runs_at_a_time_in_the_order_in_which_they_asked(tmp_path: Path) -> None:
    log, names, times = tmp_path / "log", "abcd", 25
    asks, ends = _FORK.Barrier(len(names)), _FORK.Barrier(len(names))
    children = [_FORK.Process(target=_take_turns, args=(log, name, times, asks, ends)) for name in names]
    for child in children:
        child.start()
    for child in children:
        child.join(60.0)
        assert child.exitcode == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [(name, number) for name, number, _ in lines[::2]] == [(name, number) for name, number, _ in lines[1::2]]
    assert [what for *_, what in lines] == ["in", "out"] * (times * len(names))
    assert [int(number) for _, number, _ in lines[::2]] == list(range(times * len(names)))
    assert list(tmp_path.glob("gpuprof-turns-*")) == []  # the last has removed it


def _leave_together(together: Any) -> None:
    lockf = fcntl.lockf

    def ask_together(file: int, kind: int, *rest: int) -> Any:
        if kind != fcntl.LOCK_EX | fcntl.LOCK_NB:
            return lockf(file, kind, *rest)
        together.wait(30.0)
        try:
            return lockf(file, kind, *rest)
        finally:
            together.wait(30.0)

    with open_turns("group"):
        fcntl.lockf = ask_together  # type: ignore[assignment]


def test_one_of_several_that_leave_at_once_removes_the_file(tmp_path: Path) -> None:
    together = _FORK.Barrier(3)
    children = [_FORK.Process(target=_leave_together, args=(together,)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60.0)
        assert child.exitcode == 0
    assert list(tmp_path.glob("gpuprof-turns-*")) == []


def _hold(entered: Any) -> None:
    with open_turns("group") as turn, turn:
        entered.set()
        time.sleep(60.0)


def _count_asked(directory: Path) -> int:
    """Return how many have asked for their turns so far: who asks next comes after all of them."""
    return sum(int.from_bytes(file.read_bytes()[:8], "little") for file in directory.glob("gpuprof-turns-*"))


def _start(directory: Path) -> tuple[Any, Any]:
    """Start a process that asks for its turn and keeps it; return it with the event that it has it."""
    before, entered = _count_asked(directory), _FORK.Event()
    child = _FORK.Process(target=_hold, args=(entered,))
    child.start()
    assert eventually(lambda: _count_asked(directory) > before)
    return child, entered


def _kill(child: Any) -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.join(30.0)


def test_the_turn_of_whoever_dies_goes_on_to_the_next(tmp_path: Path) -> None:
    (runs, its_turn), (waits, after), (last, at_last) = (_start(tmp_path) for _ in range(3))
    assert its_turn.wait(30.0) and not after.is_set() and not at_last.is_set()
    _kill(runs)
    assert after.wait(30.0) and not at_last.is_set()
    _kill(waits)
    assert at_last.wait(30.0)
    _kill(last)


def test_whoever_dies_while_it_waits_lets_nobody_in_beside_the_one_that_runs(tmp_path: Path) -> None:
    (runs, its_turn), (waits, _), (last, at_last) = (_start(tmp_path) for _ in range(3))
    assert its_turn.wait(30.0)
    _kill(waits)
    time.sleep(0.3)
    assert not at_last.is_set()
    _kill(runs)
    assert at_last.wait(30.0)
    _kill(last)
