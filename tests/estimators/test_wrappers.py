"""Estimators behind another: services, and third-party estimators, whose errors name them in one line."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import MEASURED, Estimate, FailedRun, Figure, TriedRuns, Workload, batch_times
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import split_name
from gpuprof.errors import InputError, PluginError
from gpuprof.estimators.builtin import ServiceEstimator, make_estimator, name_tried_services
from gpuprof.kernel_db.store import KernelDb
from gpuprof.placement.contract import demand as contract_demand
from gpuprof.placement.contract import problem

PROBLEM = problem([contract_demand("m")])
DEVICE = PROBLEM.fleet.entries[0].device
SHARE = Share(100.0)


class RecordingEstimator:
    """Passes on to the contract's estimator, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self._inner = PROBLEM.estimator

    def estimate(self, model, device, batch, share, beside=(), processes=1):  # type: ignore[no-untyped-def]
        self.asked.append((model, [neighbour.model for neighbour in beside]))
        return self._inner.estimate(model, device, batch, share, beside, processes)

    def batches(self, model, device, share):  # type: ignore[no-untyped-def]
        return self._inner.batches(model, device, share)

    def shares(self, model, device):  # type: ignore[no-untyped-def]
        return self._inner.shares(model, device)


def test_a_service_is_its_model_under_another_name() -> None:
    inner = RecordingEstimator()
    services = ServiceEstimator(inner, {"fast": "m", "slow": "m"})
    (share, *_) = services.shares("fast", DEVICE)
    (batch, *_) = services.batches("slow", DEVICE, share)
    estimate = services.estimate("fast", DEVICE, batch, share, [Workload("slow", batch, share, 1)])
    assert inner.asked == [("m", ["m"])]
    assert estimate.workload.model == "fast"
    alone = PROBLEM.estimator.estimate("m", DEVICE, batch, share)
    assert services.estimate("slow", DEVICE, batch, share).latency_ms == alone.latency_ms


def test_what_failed_of_a_model_or_a_size_failed_of_each_service_that_sends_it() -> None:
    small, large = (Workload(name, 32, SHARE, 1) for name in ("m[seq=64]", "m[seq=256]"))
    tried = TriedRuns((FailedRun("d", large, "out of memory"),), frozenset({("d", small)}))
    sources = {"mixed": "m[seq=64:0.5|seq=256:0.5]", "slow": "m[seq=256]", "short": "m[seq=64]"}
    named = name_tried_services(tried, sources)
    assert {run.workload.model for run in named.failed} == {"mixed", "slow"}
    assert [workload.model for _, workload in named.measured] == ["short"]


def test_what_ran_together_is_told_of_services_where_anything_failed_beside_others_and_else_not() -> None:
    pair = Workload("m", 1, SHARE, 1), Workload("n", 1, SHARE, 1)
    together = frozenset({("d", pair)})
    sources = {"a": "m", "b": "m", "n": "n"}
    alone = TriedRuns((FailedRun("d", pair[0], "out of memory"),), together=together)
    assert not name_tried_services(alone, sources).together
    beside = TriedRuns((FailedRun("d", pair[0], "out of memory", pair[1:]),), together=together)
    named = {tuple(run.model for run in ran) for _, ran in name_tried_services(beside, sources).together}
    assert named == {("a", "n"), ("b", "n")}


def test_requests_of_two_sizes_take_what_each_takes_by_how_many_have_it() -> None:
    inner = SizedEstimator({64: 1.0, 256: 4.0})
    services = ServiceEstimator(inner, {"s": "m[seq=64:0.75|seq=256:0.25]"})
    estimate = services.estimate("s", DEVICE, 1, SHARE)
    assert estimate.workload.model == "s"
    assert estimate.latency_ms.value == pytest.approx(0.75 * 1.0 + 0.25 * 4.0)
    variance = 0.75 * 1.0 + 0.25 * 16.0 - 1.75**2
    assert estimate.latency_cv == pytest.approx(variance**0.5 / 1.75)
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value == 256


def test_a_batch_of_two_sizes_is_a_batch_of_each() -> None:
    inner = SizedEstimator({64: 1.0, 256: 4.0}, per_row=0.5)
    services = ServiceEstimator(inner, {"s": "m[seq=64:0.5|seq=256:0.5]"})
    latency = services.estimate("s", DEVICE, 8, SHARE).latency_ms
    chance = 1.0 - 0.5**8
    # Each size is there with this chance; its fixed time once, and half the rows of each, whatever the chance.
    assert latency.value == pytest.approx(chance * (0.5 + 3.5) + 0.5 * 8)
    assert latency.low is not None and latency.low < latency.value < latency.upper()
    assert {name for name, _ in inner.asked} == {"m[seq=64]", "m[seq=256]"}


class SizedEstimator:
    """Knows what each size of a model takes: a fixed time, and more for each row after the first."""

    def __init__(self, fixed_ms: dict[int, float], per_row: float = 0.0) -> None:
        self.asked: list[tuple[str, int]] = []
        self._fixed, self._per_row = fixed_ms, per_row

    def estimate(self, model, device, batch, share, beside=(), processes=1):  # type: ignore[no-untyped-def]
        self.asked.append((model, batch))
        seq = dict(split_name(model)[1])["seq"]
        value = self._fixed[seq] + self._per_row * (batch - 1)
        return Estimate(
            Workload(model, batch, share, processes),
            device.name,
            Figure(value, "measured", 0.9 * value, 1.1 * value),
            memory_bytes=Figure(seq, "measured"),
        )

    def batches(self, model, device, share):  # type: ignore[no-untyped-def]
        return (1, 2)

    def shares(self, model, device):  # type: ignore[no-untyped-def]
        return (SHARE,)


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
def test_what_it_raises_is_said_in_one_line_and_is_no_unknown_model(tmp_path: Path, database: bool) -> None:
    name = f"{__name__}:Divides"
    estimator = make_estimator(name, KernelDb(tmp_path) if database else None)
    with pytest.raises(PluginError) as raised:
        estimator.estimate("net", _V100, 4, Share())
    assert not isinstance(raised.value, InputError) and raised.value.exit_code == 3
    assert str(raised.value).startswith(f"the estimator {name!r} failed in line ")
    assert "of test_wrappers.py: ZeroDivisionError: division by zero" in str(raised.value)
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
    with pytest.raises(PluginError, match="cannot be made from a kernel database: RuntimeError: no licence"):
        make_estimator(f"{__name__}:Unmade", None)
