"""Arrival processes and traces."""

from pathlib import Path

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
from gpuprof.domain.deployment import DeployedModel, DeploymentMap, MapPrediction, RequestedModel
from gpuprof.errors import InputError
from gpuprof.simulator.trace import (
    Trace,
    arrivals_of_rates,
    arrivals_of_trace,
    read_azure,
    read_trace,
    record_arrivals,
    write_trace,
)


def write_text(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = record_arrivals({"a": GammaArrivals(50.0, 3.0), "b,c": DeterministicArrivals(10.0)}, 20.0, seed=4)
    write_trace(trace, tmp_path / "trace.csv")
    again = read_trace(tmp_path / "trace.csv")
    assert set(again.times) == {"a", "b,c"}
    for model, times in trace.times.items():
        assert (again.times[model] == times).all()


def test_recording_ends_at_the_duration() -> None:
    trace = record_arrivals({"a": DeterministicArrivals(10.0)}, 2.05, seed=0)
    assert trace.times["a"].tolist() == [i * 100_000_000 for i in range(1, 21)]


@pytest.mark.parametrize("rate_rps", [1e-6, 1e-12])
@pytest.mark.parametrize("shape", ["poisson", "constant", "gamma:4", "batch:5", "bursts"])
def test_requests_that_come_once_in_ages_leave_an_empty_trace(shape: str, rate_rps: float) -> None:
    assert record_arrivals({"m": parse_arrivals(shape, rate_rps)}, 2.0, 0).requests == 0


def test_a_trace_may_name_no_model(tmp_path: Path) -> None:
    trace = read_trace(write_text(tmp_path, "time_s\n0\n0.5\n0.5\n"))
    assert trace.times[""].tolist() == [0, 500_000_000, 500_000_000]


def test_gaps_and_counts() -> None:
    trace = Trace({"a": np.array([0, 1_000_000_000]), "b": np.array([7_000_000_000])}, 8.0)
    assert trace.longest_gap_s() == 6.0
    assert trace.counts(4)["a"].tolist() == [2, 0, 0, 0]
    assert trace.counts(4)["b"].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: the header must name time_s but is ''"),
        ("when,model\n1,a\n", ":1: the header must name time_s but is 'when,model'"),
        ("time_s,modle\n1,a\n", ":1: unknown column 'modle'"),
        ("time_s,time_s\n1,1\n", ":1: a column stands twice"),
        ("time_s,model\n", "holds no requests"),
        ("time_s,model\n1,a\nx,a\n", ":3: time_s must be a number but got 'x'"),
        ("time_s,model\n1,a\n\n,a\n", ":4: time_s must be a number but got ''"),
        ("time_s,model\n-1,a\n", ":2: time_s must be at least 0 and at most 30 years but got -1"),
        ("time_s,model\nnan,a\n", ":2: time_s must be at least 0 and at most 30 years but got nan"),
        ("time_s,model\n1e300,a\n", ":2: time_s must be at least 0 and at most 30 years but got 1e300"),
        ("time_s,model\n2,a\n\n1,a\n", ":4: time_s 1 is earlier than 2 before it"),
        ("time_s,model\n2,a\n3\n", ":3: expected 2 fields but got 1"),
        ("time_s,model\n2,a\n3,\n", ":3: model is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_trace(write_text(tmp_path, text))
    assert message in str(error.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00time")
    with pytest.raises(InputError, match="not a text file"):
        read_trace(tmp_path / "bytes.csv")


AZURE_2019 = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\no,a,f,http,1,0,2\no,a,g,timer,5,5,5\no,a,h,queue,0,0,0\n"


def test_counts_of_minutes_become_that_many_requests_in_each(tmp_path: Path) -> None:
    trace = read_azure(write_text(tmp_path, AZURE_2019), busiest=2, seed=1)
    assert list(trace.times) == ["o/a/g", "o/a/f"]
    assert trace.duration_s == 180.0
    assert trace.counts(3)["o/a/f"].tolist() == [1, 0, 2]
    assert trace.counts(3)["o/a/g"].tolist() == [5, 5, 5]


def test_an_invocation_begins_its_duration_before_its_end(tmp_path: Path) -> None:
    text = "app,func,end_timestamp,duration\na,f,10.5,0.5\na,g,10.25,1.25\na,f,12,0\n"
    trace = read_azure(write_text(tmp_path, text), busiest=9)
    assert trace.times["a/g"].tolist() == [0]
    assert trace.times["a/f"].tolist() == [1_000_000_000, 3_000_000_000]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,c,d\n", "neither Azure Functions format"),
        (AZURE_2019.replace(",2,3\n", ",3,4\n", 1), ": minute 2 is missing: column 6 is '3'"),
        (AZURE_2019.replace("1,0,2", "1,-4,2"), "must be a whole number of at least 0"),
        (AZURE_2019.replace("1,0,2", "1,many,2"), "must be a whole number of at least 0"),
        (AZURE_2019.replace("1,0,2", "1,99999999999999999999,2"), "must be a whole number of at least 0"),
        (AZURE_2019.replace("1,0,2", "1,999999999999,2"), "too many to hold"),
        (AZURE_2019.replace("1,0,2", "1,2"), "must be a whole number of at least 0"),
        ("HashOwner,HashApp,HashFunction,Trigger,1\no,a,f,http,0\n", "holds no invocations"),
        ("app,func,end_timestamp,duration\n", "holds no invocations"),
        ("app,func,end_timestamp,duration\na,f,1,x\n", ": end_timestamp and duration must be numbers"),
        ("app,func,end_timestamp,duration\na,f,1,-1\n", ": end_timestamp and duration must be finite"),
        ("app,func,end_timestamp,duration\na,f,1\n", ": end_timestamp and duration must be finite"),
    ],
)
def test_bad_azure_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_azure(write_text(tmp_path, text), busiest=3)
    assert message in str(error.value)


def test_the_requests_of_all_members_of_a_merged_model_are_its_own() -> None:
    members = {"a": RequestedModel(rate_rps=30.0, slo_ms=50.0), "b": RequestedModel(rate_rps=10.0, slo_ms=20.0)}
    model = DeployedModel(rate_rps=40.0, slo_ms=20.0, members=members)
    deployment = DeploymentMap(
        policy="by hand", models={"ab": model}, nodes=(), predicted=MapPrediction(gpus=0, goodput_rps=0.0)
    )
    assert arrivals_of_rates(deployment, {"a": 5.0}, 1.0, "poisson")["ab"].rate_rps == 15.0
    with pytest.raises(InputError, match="unknown model 'ab'"):
        arrivals_of_rates(deployment, {"ab": 5.0}, 1.0, "poisson")
    trace = Trace({"a": np.array([1, 5, 9]), "b": np.array([2, 7])}, 1.0)
    assert trace.join(deployment.serving).times["ab"].tolist() == [1, 2, 5, 7, 9]
    assert list(arrivals_of_trace(deployment, trace)) == ["ab"]


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
        ("bursts:2,0s", "a duration must be above 0 and at most 30 years but got 0s"),
        ("diurnal:2,soon", "cannot read a duration from 'soon' (write a number and ms, s, m, h or d, as in 60s)"),
    ],
)
def test_nonsense_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_arrivals(text, 9.0)
    assert str(error.value) == message
