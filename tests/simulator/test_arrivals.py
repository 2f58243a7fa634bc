"""Arrival processes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.arrival_process import (
    NS_PER_S,
    ArrivalProcess,
    BatchPoissonArrivals,
    DeterministicArrivals,
    DiurnalArrivals,
    GammaArrivals,
    MmppArrivals,
    RecordedArrivals,
    Times,
    parse_arrivals,
    scale_to_rate,
)
from gpuprof.errors import InputError
from gpuprof.simulator.trace import record_arrivals

PROCESSES = [
    DeterministicArrivals(100.0),
    GammaArrivals(100.0),
    GammaArrivals(100.0, 4.0),
    BatchPoissonArrivals(100.0, 7),
    MmppArrivals(100.0, 5.0, 0.2, 0.8),
    DiurnalArrivals(100.0, 4.0, 10.0),
]


def take(process: ArrivalProcess, count: int, seed: int = 1) -> Times:
    return process.stream(np.random.Generator(np.random.PCG64(seed))).take(count)


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_the_mean_rate_is_what_was_asked(process: ArrivalProcess) -> None:
    times = take(process, 200_000)
    assert len(times) / (times[-1] / 1e9) == pytest.approx(100.0, rel=0.03)


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
@settings(max_examples=20, deadline=None)
@given(pieces=st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_times_rise_however_they_are_taken(process: ArrivalProcess, pieces: list[int]) -> None:
    stream = process.stream(np.random.Generator(np.random.PCG64(7)))
    times = np.concatenate([stream.take(count) for count in pieces])
    assert len(times) == sum(pieces)
    assert (np.diff(times) >= 0).all()
    assert (times >= 0).all()


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_the_same_seed_gives_the_same_times(process: ArrivalProcess) -> None:
    assert (take(process, 5000) == take(process, 5000)).all()


def test_constant_gaps_do_not_drift() -> None:
    assert take(DeterministicArrivals(3.0), 3_000_000)[-1] == pytest.approx(1e15, abs=1)


@pytest.mark.parametrize("scv", [0.25, 1.0, 4.0])
def test_gamma_gaps_vary_as_asked(scv: float) -> None:
    gaps = np.diff(take(GammaArrivals(1000.0, scv), 400_000))
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(scv, rel=0.05)


@pytest.mark.parametrize("process", [*PROCESSES, RecordedArrivals(np.arange(1, 1001) * 10_000_000, 10.0)], ids=repr)
def test_a_process_at_another_rate_keeps_its_shape(process: ArrivalProcess) -> None:
    faster = scale_to_rate(process, 2.0 * process.rate_rps)
    assert faster.rate_rps == pytest.approx(2.0 * process.rate_rps)
    if not isinstance(process, (MmppArrivals, DiurnalArrivals)):
        assert np.abs(2 * take(faster, 500) - take(process, 500)).max() <= 2


def test_bursts_vary_more_than_poisson_over_the_time_of_a_burst() -> None:
    def dispersion(process: ArrivalProcess) -> float:
        counts = np.bincount(take(process, 200_000) // 200_000_000)
        return float(counts.var() / counts.mean())

    assert dispersion(GammaArrivals(100.0)) == pytest.approx(1.0, rel=0.15)
    assert dispersion(MmppArrivals(100.0, 8.0, 0.5, 1.5)) > 8.0


@pytest.mark.parametrize("rate_rps", [1e-6, 1e-4, 1e-2])
def test_bursts_of_hardly_any_request_are_drawn_as_quickly_as_others(rate_rps: float) -> None:
    times = take(MmppArrivals(rate_rps), 1000)
    assert (np.diff(times) >= 0).all()
    assert len(times) / times[-1] * NS_PER_S == pytest.approx(rate_rps, rel=0.15)
    assert np.diff(times).std() / np.diff(times).mean() == pytest.approx(1.0, abs=0.2)  # bursts do not show any more


def test_a_trace_of_bursts_that_hold_no_request_comes_to_an_end() -> None:
    assert record_arrivals({"a": MmppArrivals(1e-9), "b": MmppArrivals(1.0)}, 3600.0, 1).counts(1)["a"].sum() == 0


def test_a_day_has_its_peak_in_the_middle() -> None:
    times = take(DiurnalArrivals(1000.0, 4.0, 100.0), 100_000)
    parts = np.bincount(times[times < 100_000_000_000] // 10_000_000_000)
    assert parts[[4, 5]].mean() / parts[[0, 9]].mean() == pytest.approx(4.0, rel=0.12)


def test_a_recording_is_replayed_and_ends() -> None:
    stream = RecordedArrivals(np.array([1, 5, 9]), 1.0).stream(np.random.Generator(np.random.PCG64(0)))
    assert [stream.take(2).tolist(), stream.take(2).tolist(), stream.take(2).tolist()] == [[1, 5], [9], []]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant", DeterministicArrivals(9.0)),
        ("Poisson", GammaArrivals(9.0)),
        ("gamma:4", GammaArrivals(9.0, 4.0)),
        ("bursts", MmppArrivals(9.0)),
        ("batch:8", BatchPoissonArrivals(9.0, 8)),
        ("bursts:3,500ms,1m", MmppArrivals(9.0, 3.0, 0.5, 60.0)),
        ("diurnal:2,12h", DiurnalArrivals(9.0, 2.0, 43200.0)),
    ],
)
def test_processes_are_read_from_text(text: str, expected: ArrivalProcess) -> None:
    assert parse_arrivals(text, 9.0) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama:4", "unknown arrival process 'gama' (did you mean gamma?)"),
        ("gamma:0", "the SCV must lie in [1e-06, 10000] but got 0"),
        ("gamma:nan", "the SCV must lie in [1e-06, 10000] but got nan"),
        ("gamma:x", "the SCV must be a number but got 'x'"),
        ("poisson:3", "too many parameters in 'poisson:3' (write poisson)"),
        ("bursts:2,0s", "a duration must be above 0 and at most 100 years but got 0s"),
        ("diurnal:2,soon", "cannot read a duration from 'soon' (write a number and ms, s, m, h or d, as in 60s)"),
    ],
)
def test_nonsense_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_arrivals(text, 9.0)
    assert str(error.value) == message
