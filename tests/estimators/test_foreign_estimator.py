"""Estimators of others: whatever is wrong with one is said in one line that names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import MEASURED, Estimate, Figure, Workload, batch_times
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, PluginError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.kernel_db.store import KernelDb

_V100 = device("v100")


class Sound:
    """Knows a time of the model ``net`` alone."""

    def __init__(self, db: object) -> None:
        self.db = db

    def estimate(self, model: str, device: Any, batch: int, share: Share, *_: object) -> Estimate:
        if model != "net":
            raise InputError(f"unknown model {model!r}")
        return Estimate(Workload(model, batch, share), device.name, Figure(1.0 + batch, MEASURED))

    def batches(self, *_: object) -> tuple[int, ...]:
        return (1, 2)

    def shares(self, *_: object) -> tuple[Share, ...]:
        return (Share(),)


class Divides(Sound):
    """Fails when it is asked for anything."""

    def estimate(self, model: str, device: Any, batch: int, share: Share, *_: object) -> Estimate:
        raise ZeroDivisionError("division\nby zero")

    def batches(self, *_: object) -> tuple[int, ...]:
        raise KeyError("net")

    def shares(self, *_: object) -> tuple[Share, ...]:
        raise OSError("gone")


class Numbers(Sound):
    """Returns numbers in place of estimates."""

    def estimate(self, *_: object) -> Any:
        return 5.0


class Changed(Sound):
    """Says what a test sets."""

    fields: ClassVar[dict[str, Any]] = {}
    answers: ClassVar[dict[str, Any]] = {}

    def estimate(self, *arguments: Any) -> Estimate:
        return replace(super().estimate(*arguments), **self.fields)

    def batches(self, *_: object) -> Any:
        return self.answers["batches"]

    def shares(self, *_: object) -> Any:
        return self.answers["shares"]


class Unmade(Sound):
    """Cannot be made."""

    def __init__(self, db: object) -> None:
        raise RuntimeError("no licence")


@pytest.mark.parametrize("database", [False, True])
def test_a_sound_one_answers_and_says_what_it_does_not_know(tmp_path: Path, database: bool) -> None:
    estimator = make_estimator(f"{__name__}:Sound", KernelDb(tmp_path) if database else None)
    assert estimator.estimate("net", _V100, 4, Share()).latency_ms.value == 5.0
    assert (estimator.batches("net", _V100, Share()), estimator.shares("net", _V100)) == ((1, 2), (Share(),))
    with pytest.raises(InputError, match="unknown model 'other'"):
        estimator.estimate("other", _V100, 4, Share())


@pytest.mark.parametrize("database", [False, True])
def test_what_it_raises_is_said_in_one_line_and_is_not_taken_for_a_model_that_it_does_not_know(
    tmp_path: Path, database: bool
) -> None:
    name = f"{__name__}:Divides"
    estimator = make_estimator(name, KernelDb(tmp_path) if database else None)
    with pytest.raises(PluginError) as raised:
        estimator.estimate("net", _V100, 4, Share())
    assert not isinstance(raised.value, InputError) and raised.value.exit_code == 3
    assert str(raised.value).startswith(f"the estimator {name!r} failed in line ")
    assert "of test_foreign_estimator.py: ZeroDivisionError: division by zero" in str(raised.value)
    with pytest.raises(PluginError, match="KeyError: 'net'"):
        estimator.batches("net", _V100, Share())
    with pytest.raises(PluginError, match="OSError: gone"):
        estimator.shares("net", _V100)


def test_what_is_no_estimate_is_refused() -> None:
    with pytest.raises(PluginError, match="returned a float and no Estimate"):
        make_estimator(f"{__name__}:Numbers", None).estimate("net", _V100, 4, Share())


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"latency_ms": Figure(math.nan, "own")}, "latency_ms must be a number above 0 but is nan"),
        ({"latency_ms": Figure(math.inf, "own")}, "latency_ms must be a number above 0 but is inf"),
        ({"latency_ms": Figure(-5.0, "own")}, "latency_ms must be a number above 0 but is -5.0"),
        ({"latency_ms": Figure(0.0, "own")}, "latency_ms must be a number above 0 but is 0.0"),
        ({"latency_ms": "5"}, "latency_ms must be a Figure with a source but is '5'"),
        ({"latency_ms": None}, "latency_ms must be a Figure with a source but is None"),
        ({"latency_ms": Figure(5.0, None)}, "latency_ms must be a Figure with a source"),  # type: ignore[arg-type]
        ({"latency_ms": Figure("5", "own")}, "latency_ms must be a number above 0 but is '5'"),  # type: ignore[arg-type]
        (
            {"latency_ms": Figure(5.0, "own", 9.0, 1.0)},
            "latency_ms must be within its interval, 9.0 to 1.0, but is 5.0",
        ),
        ({"latency_ms": Figure(5.0, "own", math.nan, 9.0)}, "latency_ms must be a number above 0"),
        ({"memory_bytes": Figure(-1.0, "own")}, "memory_bytes must be a number from 0 but is -1.0"),
        ({"memory_bytes": Figure(math.nan, "own")}, "memory_bytes must be a number from 0 but is nan"),
        ({"latency_cv": -1.0}, "latency_cv must be a number from 0 to 10 but is -1.0"),
        ({"latency_cv": math.nan}, "latency_cv must be a number from 0 to 10 but is nan"),
        ({"latency_cv": 1e9}, "latency_cv must be a number from 0 to 10 but is 1000000000.0"),
        ({"pause_cv": 11.0}, "pause_cv must be a number from 0 to 10 but is 11.0"),
        ({"pause_factor": 0.0}, "pause_factor must be a number above 0 but is 0.0"),
        ({"device": "t4"}, "device must be 'v100' but is 't4'"),
        (
            {"workload": Workload("net", 8, Share())},
            "workload must be the one that was asked for, Workload(model='net', batch=4",
        ),
    ],
)
def test_an_estimate_with_values_that_none_can_have_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], rule: str
) -> None:
    monkeypatch.setattr(Changed, "fields", fields)
    estimator = make_estimator(f"{__name__}:Changed", None)
    questions: list[Callable[[], object]] = [lambda: estimator.estimate("net", _V100, 4, Share())]
    if "latency_ms" in fields:
        questions.append(lambda: batch_times(estimator, "net", _V100, (1, 4), Share(), 1))
    for question in questions:
        with pytest.raises(PluginError) as raised:
            question()
        assert f"the estimator {f'{__name__}:Changed'!r} is wrong: {rule}" in str(raised.value)


@pytest.mark.parametrize("wrong", [(0, 1), (1.5,), ("a",), (-1,)])
def test_batches_and_shares_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, wrong: tuple[object]) -> None:
    monkeypatch.setattr(Changed, "answers", {"batches": wrong, "shares": (50,)})
    estimator = make_estimator(f"{__name__}:Changed", None)
    with pytest.raises(PluginError, match="a batch size must be a whole number from 1 but is"):
        estimator.batches("net", _V100, Share())
    with pytest.raises(PluginError, match="a share must be a Share but is 50"):
        estimator.shares("net", _V100)


def test_one_that_cannot_be_made_says_why() -> None:
    with pytest.raises(InputError, match="cannot be made from a kernel database: RuntimeError: no licence"):
        make_estimator(f"{__name__}:Unmade", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('a\\nb')", "ValueError: a b"),
        ("def", "SyntaxError: invalid syntax"),
        ("exit(7)", "SystemExit: 7"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    name = f"foreign_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as raised:
        make_estimator(f"{name}:Estimator", None)
    assert raised.value.message.startswith(f"cannot import the estimator '{name}:Estimator': {said}")
    assert "\n" not in str(raised.value)
