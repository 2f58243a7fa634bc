"""Estimators of others: whatever is wrong with one is said in one line that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import MEASURED, Estimate, Figure, Workload
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
    assert (
        str(raised.value) == f"the estimator {name!r} failed: ZeroDivisionError: division by zero (--debug shows where)"
    )
    with pytest.raises(PluginError, match="KeyError: 'net'"):
        estimator.batches("net", _V100, Share())
    with pytest.raises(PluginError, match="OSError: gone"):
        estimator.shares("net", _V100)


def test_what_is_no_estimate_is_refused() -> None:
    with pytest.raises(PluginError, match="returned a float and no Estimate"):
        make_estimator(f"{__name__}:Numbers", None).estimate("net", _V100, 4, Share())


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
