from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from gpuprof.serving.watch import garbage
from gpuprof.serving.watch.garbage import GarbageCollection

MIB = 1 << 20


class PlayedPython:
    """What Python's collector is told, with as much pending and as much memory as a test says."""

    def __init__(self) -> None:
        self.pending, self.private, self.collected, self.thresholds = 0, 100 * MIB, 0, (700, 10, 10)

    def collect(self) -> None:
        self.collected, self.pending = self.collected + 1, 0


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedPython]:
    played = PlayedPython()
    monkeypatch.setattr(
        garbage,
        "gc",
        SimpleNamespace(
            collect=played.collect,
            freeze=lambda: None,
            get_count=lambda: (0, 0, played.pending),
            get_threshold=lambda: played.thresholds,
            set_threshold=lambda *values: setattr(played, "thresholds", values),
        ),
    )
    monkeypatch.setattr(garbage, "private_bytes", lambda: played.private)
    yield played


def test_python_collects_all_by_itself_neither_meanwhile_nor_never_again(python: PlayedPython) -> None:
    collection = GarbageCollection()
    collection.start()
    assert python.thresholds[:2] == (700, 10) and python.thresholds[2] > 1 << 30 and python.collected == 1
    collection.stop()
    assert python.thresholds == (700, 10, 10)


def test_with_few_calls_all_is_collected_as_often_as_python_would(python: PlayedPython) -> None:
    collection = GarbageCollection()
    collection.start()
    python.pending = 9
    collection.collect(open_count=3)
    assert python.collected == 1
    python.pending = 10
    collection.collect(open_count=3)
    assert python.collected == 2


def test_with_thousands_of_calls_nothing_is_collected_until_memory_has_grown_by_more_than_they_have(
    python: PlayedPython,
) -> None:
    collection = GarbageCollection()
    collection.start()
    python.pending = 1000
    python.private += 64 * MIB + 8000 * (40 << 10)
    collection.collect(open_count=8000)
    assert python.collected == 1
    python.private += MIB
    collection.collect(open_count=8000)
    assert python.collected == 2
    python.pending = 1000
    collection.collect(open_count=8000)  # it has not grown since
    assert python.collected == 2
    collection.collect(open_count=1000)
    assert python.collected == 3


def test_what_is_left_in_cycles_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []

    class Knot:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            freed.append(1)

    collection = GarbageCollection()
    collection.start()
    try:
        Knot()
        monkeypatch.setattr(garbage, "_PENDING", 0)
        collection.collect(open_count=0)
        assert freed
    finally:
        collection.stop()
        gc.unfreeze()
