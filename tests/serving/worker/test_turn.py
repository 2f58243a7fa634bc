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
                os.write(file.fileno(), f"{name} in\n".encode())
                time.sleep(0.005)
                os.write(file.fileno(), f"{name} out\n".encode())
        ends.wait()


def test_one_runs_at_a_time_and_nobody_has_two_turns_while_another_waits(tmp_path: Path) -> None:
    log, names, times = tmp_path / "log", "abcd", 25
    asks, ends = _FORK.Barrier(len(names)), _FORK.Barrier(len(names))
    children = [_FORK.Process(target=_take_turns, args=(log, name, times, asks, ends)) for name in names]
    for child in children:
        child.start()
    for child in children:
        child.join(60.0)
        assert child.exitcode == 0
    lines = log.read_text().splitlines()
    assert len(lines) == 2 * times * len(names)
    entered = [line.split()[0] for line in lines[::2]]
    assert all(line == f"{name} out" for name, line in zip(entered, lines[1::2], strict=True))
    # Each asks again at once: from when all have come until the first has had all its turns they go round.
    began = max(entered.index(name) for name in names)
    ended = min(max(place for place, one in enumerate(entered) if one == name) for name in names)
    rounds = [set(entered[place : place + len(names)]) for place in range(began, ended - len(names))]
    # One that the machine stops between two turns asks late, which four rounds in a row tell of.
    assert sum(one != set(names) for one in rounds) <= len(rounds) // 8
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


def _hold(asks: Any, entered: Any) -> None:
    with open_turns("group") as turn:
        asks.set()
        with turn:
            entered.set()
            time.sleep(60.0)


def _start() -> tuple[Any, Any]:
    """Start a process that asks for its turn and keeps it; return it with the event that it has it."""
    asks, entered = _FORK.Event(), _FORK.Event()
    child = _FORK.Process(target=_hold, args=(asks, entered))
    child.start()
    assert asks.wait(30.0)
    time.sleep(0.2)  # it is in the queue
    return child, entered


def _kill(child: Any) -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.join(30.0)


def test_the_turn_of_whoever_dies_goes_on_to_the_next() -> None:
    (runs, its_turn), (waits, after), (last, at_last) = _start(), _start(), _start()
    assert its_turn.is_set() and not after.is_set() and not at_last.is_set()
    _kill(runs)
    assert after.wait(30.0) and not at_last.is_set()
    _kill(waits)
    assert at_last.wait(30.0)
    _kill(last)


def test_whoever_dies_while_it_waits_lets_nobody_in_beside_the_one_that_runs() -> None:
    (runs, _), (waits, _), (last, at_last) = _start(), _start(), _start()
    _kill(waits)
    time.sleep(0.3)
    assert not at_last.is_set()
    _kill(runs)
    assert at_last.wait(30.0)
    _kill(last)
