"""Checkouts are asked in turn, and told as times of the first one of the same round."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from bench.clients import LoopResult
from bench.compare_checkouts import CheckoutServer, compare, show
from bench.serving import Case

_CASE = Case("null:4", 1, 16)


class FakeServer:
    """Answers as fast as it is told, and notes that it was asked."""

    def __init__(self, name: str, rates_rps: list[float], asked: list[str]) -> None:
        self._name, self._asked = name, asked
        self._rates = iter(rates_rps)

    def ask(self, protocol: str, case: Case, seconds: float) -> LoopResult:
        self._asked.append(self._name)
        return LoopResult(next(self._rates), 1.0, 2.0, 0.1, 0.2, 0.3)


def test_rounds_alternate_and_ratios_are_of_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    # The machine halves in speed for the second round: nothing of that is in the ratios.
    servers = [FakeServer("old", [100.0, 50.0, 100.0], asked), FakeServer("new", [120.0, 55.0, 130.0], asked)]
    compared = compare(cast(list[CheckoutServer], servers), "http", _CASE, rounds=3, seconds=0.1)
    assert asked == ["old", "new", "new", "old", "old", "new"]
    assert compared.ratios(1) == pytest.approx([1.1, 1.2, 1.3])
    show([Path("old"), Path("new")], "http", _CASE, compared)
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["http", "null:4", "16", "100", "0.200", "1.00", "(1.00", "to", "1.00)", "old"]
    assert second.split() == ["http", "null:4", "16", "120", "0.200", "1.20", "(1.10", "to", "1.30)", "new"]
