"""The engine: event order, conservation, failures, bounds, the same rules as the runtime, and queueing theory."""

import hashlib
import heapq
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.arrival_process import (
    ArrivalProcess,
    DeterministicArrivals,
    GammaArrivals,
    MmppArrivals,
    RecordedArrivals,
)
from gpuprof.domain.deployment import DeploymentMap, Replica
from gpuprof.domain.host_work import HostWork
from gpuprof.domain.sojourn import BatchServer
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.rules.batching import batch_size_now
from gpuprof.rules.host_work import disturb_servers
from gpuprof.rules.routing import FastestFirst, ReplicaLoad, decay_count, forecast_joining
from gpuprof.rules.turns import LoadedReplica
from gpuprof.simulator import engine
from gpuprof.simulator.cluster import Failure, SimulationOptions, parse_failure
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.outcome import ModelOutcome, SimulationOutcome
from gpuprof.simulator.state import LONGEST_NS, bin_of, bins, cdf_ms, edges_ns, percentile_ms
from tests.simulator.maps import at, make_map, replica


def outcome(
    replicas: Sequence[Replica], *milliseconds: float, slo_ms: float = 1e6, options: SimulationOptions | None = None
) -> ModelOutcome:
    """Each replica on a GPU of its own, and one model."""
    result = simulate(
        make_map([[r] for r in replicas], slo_ms), {"m": at(*milliseconds)}, options or SimulationOptions(1.0)
    )
    return result.models[0]


def test_a_part_of_a_batch_waits_for_others_and_then_goes() -> None:
    result = outcome([replica("m", [5.0, 6.0, 7.0], max_wait_ms=2.0)], 0.0, 1.0)
    assert result.stage_mean_ms["batching"] == 1.5
    assert result.stage_mean_ms["service"] == 6.0
    assert result.stage_mean_ms["queue"] == 0.0


def test_a_timeout_of_all_batches_replaces_their_own_and_knows_no_deadline() -> None:
    waiting = SimulationOptions(1.0, batch_timeout_ms=50.0)
    result = outcome([replica("m", [5.0, 6.0, 7.0], max_wait_ms=2.0)], 0.0, options=waiting, slo_ms=20.0)
    assert (result.max_ms, result.in_time) == (55.0, 0)


def test_waiting_for_a_process_is_queueing_not_batching() -> None:
    result = outcome([replica("m", [5.0, 5.0])], 0.0, 1.0)
    assert result.stage_mean_ms["queue"] == 2.0
    assert result.stage_mean_ms["batching"] == 0.0


def test_a_batch_after_a_pause_takes_longer_than_one_that_follows_another() -> None:
    server = replica("m", [4.0])
    cold = server.model_copy(update={"predicted": server.predicted.model_copy(update={"pause_factor": 1.5})})
    result = outcome([cold], 0.0, 1.0, 50.0)
    assert result.stage_mean_ms["service"] == pytest.approx((6.0 + 4.0 + 6.0) / 3)


def test_batches_after_a_pause_vary_by_a_spread_of_their_own() -> None:
    server = replica("m", [4.0], cv=0.01)
    predicted = server.predicted.model_copy(update={"pause_factor": 1.5, "pause_cv": 0.5})
    cold = server.model_copy(update={"predicted": predicted})
    resting = simulate(make_map([[cold]]), {"m": DeterministicArrivals(10.0)}, SimulationOptions(200.0)).models[0]
    busy = simulate(
        make_map([[cold]]), {"m": DeterministicArrivals(1000.0)}, SimulationOptions(2.0, refuse_hopeless=False)
    ).models[0]
    assert resting.mean_ms == pytest.approx(6.0, rel=0.05)
    assert resting.p95_ms == pytest.approx(6.0 * 1.94, rel=0.1)  # of a gamma distribution of shape 4
    assert busy.stage_p99_ms["service"] == pytest.approx(4.0 * 1.024, rel=0.03)


@pytest.mark.parametrize("name", ["latency_cv", "pause_cv"])
def test_times_that_vary_by_more_than_any_can_are_refused(name: str) -> None:
    server = replica("m", [5.0])
    wild = server.model_copy(update={"predicted": server.predicted.model_copy(update={name: 1e300})})
    with pytest.raises(InputError, match="vary by more than 10 times itself"):
        outcome([wild], 0.0)


def test_both_legs_of_the_network_count() -> None:
    result = outcome([replica("m", [5.0])], 0.0, options=SimulationOptions(1.0, legs_ms={"m": (2.0, 0.5)}))
    assert result.stage_mean_ms["network"] == 2.5
    assert result.mean_ms == 7.5


def test_a_hopeless_request_is_refused_when_asked() -> None:
    result = outcome(
        [replica("m", [5.0])], 0.0, 1.0, 2.0, slo_ms=9.0, options=SimulationOptions(1.0, refuse_hopeless=True)
    )
    assert (result.answered, result.missed["refused"], result.in_time) == (2, 1, 2)


def test_a_miss_has_a_cause() -> None:
    let_in = SimulationOptions(1.0, refuse_hopeless=False)
    assert outcome([replica("m", [5.0])], 0.0, slo_ms=4.0).missed["service"] == 1
    assert outcome([replica("m", [5.0])], 0.0, 0.0, slo_ms=6.0, options=let_in).missed["queue"] == 1
    assert (
        outcome([replica("m", [2.0, 2.0], max_wait_ms=4.5)], 0.0, slo_ms=6.0).missed["batching"] == 0
    )  # wait_limit_ms
    far = SimulationOptions(1.0, legs_ms={"m": (6.0, 3.0)})
    assert outcome([replica("m", [2.0])], 0.0, slo_ms=6.0, options=far).missed["network"] == 1


def test_what_a_gpu_that_fails_had_to_do_is_done_elsewhere() -> None:
    result = simulate(
        make_map([[replica("m", [100.0])], [replica("m", [100.0])]]),
        {"m": at(0.0, 0.0, 1.0, 1.0)},
        SimulationOptions(1.0, failures=(Failure("node0", 0, 0.010),)),
    )
    assert [r.answered for r in result.replicas] == [0, 4]
    assert result.models[0].max_ms == pytest.approx(399.0)


def test_a_node_that_comes_back_serves_again() -> None:
    result = outcome(
        [replica("m", [5.0])],
        0.0,
        20.0,
        50.0,
        options=SimulationOptions(1.0, failures=(Failure("node0", None, 0.010, 0.020),)),
    )
    assert (result.answered, result.missed["failed"]) == (2, 1)


def test_a_model_without_replicas_answers_nothing() -> None:
    deployment = make_map([[replica("m", [5.0])]])
    models = {**deployment.models, "other": deployment.models["m"]}
    result = simulate(deployment.model_copy(update={"models": models}), {"other": at(0.0)}, SimulationOptions(1.0))
    assert result.models[1].missed["failed"] == 1


def test_memory_is_bounded_under_a_thousand_times_the_capacity() -> None:
    options = SimulationOptions(1.0, max_in_system=512)
    result = simulate(make_map([[replica("m", [10.0])]]), {"m": DeterministicArrivals(100_000.0)}, options).models[0]
    assert result.missed["full"] + result.answered == result.requests == 99_999
    assert result.answered == pytest.approx(512 + 100, abs=2)


def test_what_is_answered_after_the_end_counts_as_answered_but_not_as_throughput() -> None:
    options = SimulationOptions(1.0, refuse_hopeless=False)
    result = simulate(make_map([[replica("m", [10.0, 10.0])]]), {"m": DeterministicArrivals(1000.0)}, options).replicas[
        0
    ]
    assert result.answered == 999
    assert result.throughput_rps == pytest.approx(200.0, abs=3)
    assert result.mean_batch == pytest.approx(2.0, abs=0.01)


def test_what_arrives_before_the_warm_up_ends_is_not_counted() -> None:
    result = outcome([replica("m", [5.0])], 1.0, 400.0, 600.0, options=SimulationOptions(1.0, warmup_s=0.5))
    assert (result.requests, result.rate_rps) == (1, 2.0)


def test_an_empty_map_and_a_model_that_the_map_lacks_are_refused() -> None:
    with pytest.raises(InputError, match="the map holds no replicas"):
        simulate(make_map([[]]), {}, SimulationOptions(1.0))
    with pytest.raises(InputError) as error:
        simulate(make_map([[replica("m", [5.0])]]), {"x": GammaArrivals(1.0)}, SimulationOptions(1.0))
    assert str(error.value) == "the map has no model 'x' (it has m)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0@30s", Failure("node0", None, 30.0)),
        ("node0/1@500ms", Failure("node0", 1, 0.5)),
        ("node0/1@1m+10s", Failure("node0", 1, 60.0, 10.0)),
    ],
)
def test_failures_are_read_from_text(text: str, expected: Failure) -> None:
    assert parse_failure(text, make_map([[replica("m", [5.0])], [replica("m", [5.0])]])) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node0", "cannot read the failure 'node0'"),
        ("node7@3s", "unknown node 'node7'"),
        ("node0/4@3s", "node0 has no GPU 4 (it has 0)"),
        ("node0@soon", "cannot read the time of a failure from 'soon'"),
    ],
)
def test_failures_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_failure(text, make_map([[replica("m", [5.0])]]))
    assert message in str(error.value)


_replicas = st.builds(
    lambda first, more, processes, wait: replica(
        "m", [first + 0.25 * sum(more[:i]) for i in range(len(more) + 1)], processes=processes, max_wait_ms=wait / 4
    ),
    first=st.integers(1, 8).map(float),
    more=st.lists(st.integers(0, 4), max_size=3),
    processes=st.integers(1, 3),
    wait=st.integers(0, 12),
)


@settings(max_examples=60, deadline=None)
@given(replicas=st.lists(_replicas, min_size=1, max_size=9), gaps=st.lists(st.integers(0, 8), min_size=1, max_size=40))
def test_the_engine_does_what_the_rules_of_the_runtime_say(replicas: list[Replica], gaps: list[int]) -> None:
    times = (np.cumsum(gaps) * 250_000).tolist()
    expected = play(replicas, times, FastestFirst())
    result = simulate(
        make_map([[r] for r in replicas]), {"m": RecordedArrivals(np.array(times), 1.0)}, SimulationOptions(1.0)
    ).models[0]
    latencies = [(end - arrival) / 1e6 for end, arrival in zip(expected, times, strict=True)]
    assert result.answered == len(times)
    assert result.mean_ms == pytest.approx(sum(latencies) / len(latencies), rel=1e-9)
    assert result.max_ms == pytest.approx(max(latencies), rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(
    load=st.floats(0.1, 3.0),
    seed=st.integers(0, 2**31),
    cv=st.sampled_from([0.0, 0.1, 1.5]),
    refuse=st.booleans(),
    leg_ms=st.sampled_from([0.0, 0.7]),
    fails=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 900), st.integers(1, 500)), max_size=2),
)
def test_every_request_is_answered_or_missed_once(
    load: float, seed: int, cv: float, refuse: bool, leg_ms: float, fails: list[tuple[int, int, int]]
) -> None:
    gpus = [[replica("a", [4.0, 5.0], max_wait_ms=1.0, cv=cv), replica("b", [3.0], processes=2, cv=cv)]] * 2
    failures = tuple(Failure("node0", gpu, start / 1000, lasts / 1000) for gpu, start, lasts in fails)
    options = SimulationOptions(
        1.0, seed=seed, refuse_hopeless=refuse, legs_ms={"a": (leg_ms, 0.0)}, failures=failures, max_in_system=64
    )
    result = simulate(
        make_map(gpus, 20.0), {"a": GammaArrivals(800 * load), "b": GammaArrivals(1300 * load, 3.0)}, options
    )
    for model in result.models:
        late = sum(count for cause, count in model.missed.items() if cause not in ("refused", "full", "failed"))
        assert model.requests == model.in_time + sum(model.missed.values())
        assert model.answered == model.in_time + late
    assert sum(m.answered for m in result.models) == sum(r.answered for r in result.replicas)
    assert all(0.0 <= r.utilization <= 1.0 for r in result.replicas)


def mixed_map() -> DeploymentMap:
    return make_map(
        [
            [replica("a", [4.0, 5.0, 5.5], max_wait_ms=1.0, cv=0.3), replica("b", [3.0], processes=2)],
            [replica("a", [3.0, 4.0], processes=2, cv=0.1)],
        ],
        15.0,
    )


def mix(seed: int = 5) -> str:
    """A run that uses everything, as a hash of its outcome."""
    options = SimulationOptions(
        2.0, warmup_s=0.25, seed=seed, legs_ms={"a": (0.2, 0.1)}, failures=(Failure("node0", 1, 0.8, 0.5),)
    )
    arrivals: dict[str, ArrivalProcess] = {"a": MmppArrivals(600.0, 4.0, 0.1, 0.3), "b": GammaArrivals(400.0, 2.0)}
    result = simulate(mixed_map(), arrivals, options)
    return hashlib.sha256(json.dumps(result.document()).encode()).hexdigest()


def test_a_seed_gives_the_same_bytes() -> None:
    assert mix() == mix()
    assert mix() != mix(seed=6)


def test_machine_code_and_plain_python_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_compiled", None)
    monkeypatch.setattr(engine, "_PLAIN_S", 1e9)
    plain = mix()
    engine.use_machine_code()
    assert plain == mix()


def test_a_long_run_goes_on_in_machine_code_where_plain_python_has_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    engine.use_machine_code()
    compiled = mix()
    used = []
    for looks in (1, 3, 6):
        left = iter([False] * looks)
        monkeypatch.setattr(engine, "_compiled", None)

        def find(_: object, left: Iterator[bool] = left) -> bool:
            if next(left, None) is None:
                engine.use_machine_code()
                used.append(left)
                return True
            return False

        monkeypatch.setattr(engine.EventLoop, "_finds_machine_code", find)
        assert mix() == compiled
    assert len(used) == 3


def long_run(server: Replica, rate_rps: float, seconds: float) -> SimulationOutcome:
    return simulate(
        make_map([[server]]), {"m": GammaArrivals(rate_rps)}, SimulationOptions(seconds, warmup_s=seconds / 50, seed=1)
    )


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_server_of_constant_service_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    result = long_run(replica("m", [1.0]), 1000.0 * load, 6000.0).models[0]
    assert result.stage_mean_ms["queue"] == pytest.approx(load / (2 * (1 - load)), rel=0.01)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (4, 0.7), pytest.param(8, 0.8, marks=pytest.mark.slow)])
def test_servers_of_exponential_service_wait_as_erlang_says(servers: int, load: float) -> None:
    result = long_run(replica("m", [1.0], processes=servers, cv=1.0), 1000.0 * servers * load, 8000.0 / servers).models[
        0
    ]
    offered = servers * load
    waits = offered**servers / math.factorial(servers) / (1 - load)
    probability = waits / (sum(offered**k / math.factorial(k) for k in range(servers)) + waits)
    assert result.stage_mean_ms["queue"] == pytest.approx(probability / (servers * (1 - load)), rel=0.01)


TWO_CORES = HostWork(host_ms=2.0, host_cores=2)


def half(model: str, ms: float = 10.0, share_pct: float = 50.0) -> Replica:
    return replica(model, [ms]).model_copy(update={"sm_share_pct": share_pct})


def run(
    replicas: Sequence[Replica], arrivals_ms: Mapping[str, Sequence[float]], host: HostWork, gpus: int = 1
) -> SimulationOutcome:
    times: dict[str, ArrivalProcess] = {
        model: RecordedArrivals(np.array([round(1e6 * t) for t in times_ms], np.int64), 1.0)
        for model, times_ms in arrivals_ms.items()
    }
    spread = [replicas[i::gpus] for i in range(gpus)]
    return simulate(make_map(spread), times, SimulationOptions(1.0, host=host))


def longest(outcome: SimulationOutcome) -> list[float]:
    return [model.max_ms or 0.0 for model in outcome.models]


def test_nobody_is_disturbed_while_a_core_is_idle() -> None:
    # b comes when a has gone: there is an idle core all the time.
    assert longest(run([half("a"), half("b")], {"a": [0.0], "b": [20.0]}, TWO_CORES)) == [10.0, 10.0]


def test_what_comes_while_every_core_runs_a_batch_takes_its_time_from_one() -> None:
    # At 2 both run; the arrivals at 3 and 4 take 1 ms each from one of them or the other.
    simulated = run([half("a"), half("b")], {"a": [0.0, 3.0, 4.0], "b": [2.0]}, TWO_CORES)
    quiet = run([half("a"), half("b")], {"a": [0.0, 3.0, 4.0], "b": [2.0]}, HostWork())
    assert simulated.replicas[0].utilization + simulated.replicas[1].utilization > sum(
        replica.utilization for replica in quiet.replicas
    )
    assert longest(quiet) == [26.0, 10.0]
    assert all(late >= early for late, early in zip(longest(simulated), longest(quiet), strict=True))
    assert longest(simulated) != longest(quiet)


def test_alone_on_its_only_core_a_batch_bears_every_request() -> None:
    # 1 ms each at 3 and 4, while the batch runs, and at its end for the answer, while the next one runs; and so on.
    simulated = run([half("a", share_pct=100.0)], {"a": [0.0, 3.0, 4.0]}, HostWork(host_ms=2.0, host_cores=1))
    assert longest(simulated) == [pytest.approx(34.0 - 4.0, abs=1e-6)]  # ends at 13, 24 and so 12 + 11 + 11


@pytest.mark.parametrize("cores", [1, 2])
def test_a_time_sliced_worker_loses_the_time_of_one_of_its_cores(cores: int) -> None:
    worker = [half("a", 100.0, 100.0).model_copy(update={"turns": 1, "time_slice_ms": 5.0})]
    work = HostWork(host_ms=4.0, host_cores=cores)
    (ms,) = longest(run(worker, {"a": [0.0, 10.0]}, work))
    # The second request's 2 ms delay the first batch; the first answer's 2 ms delay the second batch.
    assert ms == pytest.approx(90.0 + 2.0 / cores + 100.0 + 2.0 / cores, abs=1e-3)


def test_on_several_machines_and_for_replicas_that_come_and_go_nothing_is_said() -> None:
    arrivals = {"a": [0.0, 3.0, 4.0], "b": [2.0]}
    assert longest(run([half("a"), half("b")], arrivals, TWO_CORES, gpus=2)) == [26.0, 10.0]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_the_simulation_comes_to_what_the_prediction_says(load: float) -> None:
    """Mean time in service, by the queueing model that `place` predicts with and event by event."""
    ms = {"a": 6.5, "b": 46.0}
    host = HostWork(host_ms=0.8, host_cores=2)
    rates = {model: load * 1000.0 / time for model, time in ms.items()}
    arrivals: dict[str, ArrivalProcess] = {model: GammaArrivals(rate) for model, rate in rates.items()}
    parts = [half(model, time) for model, time in ms.items()]
    simulated = simulate(make_map([parts]), arrivals, SimulationOptions(2000.0, seed=1, host=host))
    running = [LoadedReplica(BatchServer((time,), 1, 0.0), rates[model], 50.0) for model, time in ms.items()]
    expected = disturb_servers(host, running, BatchQueue())
    for model, calm, server in zip(simulated.models, ms.values(), expected, strict=True):
        longer, predicted = (model.stage_mean_ms["service"] or 0.0) / calm - 1.0, server.latency_ms[0] / calm - 1.0
        # The long batches are met more often than predicted: they go on beside several of the short ones.
        assert longer == pytest.approx(predicted, rel=0.15 if model.model == "a" else 0.4, abs=0.001)


def test_most_of_the_work_goes_on_where_it_was_idle_last() -> None:
    # b's batch runs all the while; every second of a's comes while the one before it runs.
    arrivals = {"a": [10.0 * k for k in range(1, 40)] + [10.0 * k + 1.0 for k in range(1, 40)], "b": [0.0]}
    short, long = run([half("a", 4.0), half("b", 500.0)], arrivals, TWO_CORES).replicas
    extra = short.utilization - 78 * 4.0 / 1000.0, long.utilization - 0.5
    assert extra[0] + extra[1] > 0.05
    assert extra[0] > 3.0 * extra[1] > 0.0


@settings(deadline=None)  # the first call may compile
@given(value=st.integers(0, LONGEST_NS), bits=st.sampled_from([6, 9]))
def test_a_time_lies_in_its_bin_and_the_bin_is_narrow(value: int, bits: int) -> None:
    edges = edges_ns(bits)
    position = bin_of(value, bits)
    assert edges[position] <= value < edges[position + 1]
    assert edges[position + 1] - edges[position] <= max(1, value / 2 ** (bits - 1))


def test_percentiles_are_those_of_the_values() -> None:
    values = np.random.default_rng(3).gamma(2.0, 5e6, 20_000).astype(np.int64)
    counts = np.bincount([bin_of(int(v), 9) for v in values], minlength=bins(9))
    for percent in (50.0, 95.0, 99.0):
        assert percentile_ms(counts, 9, percent) == pytest.approx(np.percentile(values, percent) / 1e6, rel=0.004)
    times, fraction = cdf_ms(counts, 9)
    assert fraction[-1] == 1.0
    assert np.interp(10.0, times, fraction) == pytest.approx((values <= 10e6).mean(), abs=0.005)


def group(own_ms: dict[str, float], turns: int = 1, time_slice_ms: float | None = None) -> list[Replica]:
    """Replicas of one worker, for batches of one."""
    worker = {"turns": turns, "time_slice_ms": time_slice_ms, "sm_share_pct": 40.0}
    return [replica(model, [turn_ms]).model_copy(update=worker) for model, turn_ms in own_ms.items()]


def test_groups_and_devices_take_their_turns_apart() -> None:
    gpus = [[*group({"a": 10.0, "b": 4.0}), *group({"c": 5.0, "d": 5.0}, 2)], group({"e": 3.0, "f": 3.0})]
    result = simulate(make_map(gpus), {model: at(0.0) for model in "abcdef"}, SimulationOptions(1.0))
    assert [model.mean_ms for model in result.models] == [10.0, 14.0, 5.0, 10.0, 3.0, 6.0]


def test_batches_of_a_time_sliced_worker_run_in_rotation() -> None:
    own_ms = {"long": 10.0, "mid": 4.0, "short": 1.0}
    # long 0-3 (a slice begins at 0, another at 3), mid 3-6, short 6-7, long 7-10, mid 10-11, long 11-15
    arrivals = {"long": at(0.0), "mid": at(2.0), "short": at(2.5)}
    apart = group({"other": 5.0}, 2, 3.0)
    result = simulate(
        make_map([[*group(own_ms, 1, 3.0), *apart]]), arrivals | {"other": at(0.0)}, SimulationOptions(1.0)
    )
    assert [model.mean_ms for model in result.models] == pytest.approx([15.0, 9.0, 4.5, 5.0], abs=1e-4)


def test_of_very_short_slices_each_batch_has_an_equal_part() -> None:
    own_ms = {"long": 10.0, "mid": 4.0, "short": 1.0}
    # Left at 4 ms: 7, 3 and 1, of which a third is done each ms; from 7 ms on 6 and 2; from 11 ms on 4.
    arrivals = {"long": at(0.0), "mid": at(2.0), "short": at(4.0)}
    result = simulate(make_map([group(own_ms, 1, 0.02)]), arrivals, SimulationOptions(1.0))
    assert [model.mean_ms for model in result.models] == pytest.approx([15.0, 9.0, 3.0], abs=0.1)


def test_time_sliced_batches_end_with_their_device() -> None:
    workers = group({"a": 10.0, "b": 10.0}, 1, 1.0)
    options = SimulationOptions(1.0, failures=(Failure("node0", None, 0.005, 0.010),))
    result = simulate(make_map([workers]), {"a": at(0.0), "b": at(0.0, 30.0)}, options)
    # Both begin anew at 15 ms: a ends at 34 ms, b at 35 ms, and b's second request at 45 ms.
    assert [model.max_ms for model in result.models] == pytest.approx([34.0, 35.0], abs=1e-4)
    assert [model.answered for model in result.models] == [1, 2]


@pytest.mark.parametrize("cv", [0.0, 2.0])
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_many_time_sliced_batches_are_a_processor_sharing_queue(load: float, cv: float) -> None:
    """In M/G/1-PS the mean time is S / (1 - load), whatever the distribution (Kleinrock 1967)."""
    server = replica("m", [1.0], processes=200, cv=cv).model_copy(update={"turns": 1, "time_slice_ms": 0.02})
    options = SimulationOptions(200.0, refuse_hopeless=False, seed=1)
    (result,) = simulate(make_map([[server]]), {"m": GammaArrivals(1000.0 * load, 1.0)}, options).models
    assert result.mean_ms == pytest.approx(1.0 / (1.0 - load), rel=0.06)


@pytest.mark.parametrize("slice_ms", [None, 2])
@settings(max_examples=40, deadline=None)
@given(
    own=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    sent=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), min_size=1, max_size=60),
)
def test_as_a_queue_of_one_server_with_a_batch_of_each_model(
    slice_ms: int | None, own: list[int], sent: list[tuple[int, int]]
) -> None:
    names = [f"m{number}" for number in range(len(own))]
    # Apart by nanoseconds, so that no two events are at one instant.
    due = sorted(
        {
            (time * 1_000_000 + number * 1000 + model % len(own), model % len(own))
            for number, (model, time) in enumerate(sent)
        }
    )
    arrivals = {
        name: RecordedArrivals(np.array([time for time, model in due if model == number], np.int64), 1.0)
        for number, name in enumerate(names)
    }
    given_map = make_map([group(dict(zip(names, map(float, own), strict=True)), 1, slice_ms)])
    result = simulate(given_map, arrivals, SimulationOptions(1.0, refuse_hopeless=False))
    for number, row in enumerate(result.models):
        expected = rotate(own, due, number, slice_ms) if slice_ms else play_turns(own, due, number)
        assert row.requests == len(expected)
        if expected:
            assert row.mean_ms == pytest.approx(sum(expected) / len(expected) * 1e-6, rel=1e-6)


def play_turns(batch_ms: list[int], due: list[tuple[int, int]], which: int) -> list[int]:
    """Return the times of a model's requests: each model holds one request ready, the oldest ready one runs next."""
    waiting: dict[int, list[int]] = {
        number: [time for time, model in due if model == number] for number in range(len(batch_ms))
    }
    free_at = dict.fromkeys(waiting, 0)  # when a model's request before has been answered
    until, durations = 0, []
    while any(waiting.values()):
        ready, number = min((max(times[0], free_at[number]), number) for number, times in waiting.items() if times)
        until = max(until, ready) + batch_ms[number] * 1_000_000
        free_at[number] = until
        sent = waiting[number].pop(0)
        if number == which:
            durations.append(until - sent)
    return durations


def rotate(batch_ms: list[int], due: list[tuple[int, int]], which: int, slice_ms: int) -> list[int]:
    """Return the times of a model's requests where the oldest requests of all models run in rotation."""
    slice_ns, queues = slice_ms * 1_000_000, [deque[int]() for _ in batch_ms]
    ring: deque[tuple[int, int]] = deque()  # model and rest of its batch
    now, slice_end, coming, durations = 0, 0, deque(due), []

    def begin(model: int) -> None:
        nonlocal slice_end
        slice_end = now + slice_ns if not ring else slice_end
        ring.append((model, batch_ms[model] * 1_000_000))

    while coming or ring:
        then = min([now + ring[0][1], slice_end] if ring else [coming[0][0]])
        if not ring or (coming and coming[0][0] < then):
            then = coming[0][0]
        if ring:
            ring[0] = ring[0][0], ring[0][1] - (then - now)
        now = then
        if ring and ring[0][1] == 0:
            model, _ = ring.popleft()
            sent = queues[model].popleft()
            durations += [now - sent] if model == which else []
            slice_end = now + slice_ns
            if queues[model]:
                begin(model)
        elif ring and now == slice_end:
            ring.rotate(-1)
            slice_end = now + slice_ns
        else:
            sent, model = coming.popleft()
            queues[model].append(sent)
            if len(queues[model]) == 1:
                begin(model)
    return durations


@dataclass
class ReferenceServer:
    """One replica: its queue of (arrival, request) and when each process is free."""

    replica: Replica
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    free_at: list[int] = field(default_factory=list)
    idle: list[bool] = field(default_factory=list)
    count: float = 0.0
    counted_at: int = 0
    joining: int = 0

    def load(self, now: int) -> ReplicaLoad:
        oldest = (now - self.queue[0][0]) * 1e-6 if self.queue else 0.0
        busy = tuple(max(0, t - now) * 1e-6 for t in self.free_at)
        assert self.replica.batch_latency_ms is not None
        idle, times = sum(self.idle), self.replica.batch_latency_ms
        joining = 0 if idle else self.joining
        return ReplicaLoad(len(self.queue), oldest, busy, times, self.replica.max_wait_ms, idle, joining)

    def count_arrivals(self, now: int) -> float:
        assert self.replica.batch_latency_ms is not None
        return decay_count(self.count, (now - self.counted_at) * 1e-6, self.replica.batch_latency_ms[-1])

    def begin(self, size: int, now: int) -> None:
        times = self.replica.batch_latency_ms
        assert times is not None
        count = self.count_arrivals(now)
        self.joining = forecast_joining(count, times[size - 1], times, len(self.idle), 0.0, math.inf)


def play(replicas: Sequence[Replica], arrivals: Sequence[int], rule: FastestFirst) -> list[int]:
    """Return when each request is answered, all of one model, without randomness; times in nanoseconds."""
    servers = [ReferenceServer(r, free_at=[0] * r.processes, idle=[True] * r.processes) for r in replicas]
    first_process = [sum(r.processes for r in replicas[:i]) for i in range(len(replicas))]
    events: list[tuple[int, int, int]] = [(time, 2, i) for i, time in enumerate(arrivals)]
    heapq.heapify(events)
    answered = [0] * len(arrivals)

    def start(s: int, now: int) -> None:
        server, replica = servers[s], replicas[s]
        assert replica.batch_latency_ms is not None
        while any(server.idle) and server.queue:
            limit = round(replica.max_wait_ms * 1e6)
            over = now - server.queue[0][0] >= limit
            waited = (
                replica.max_wait_ms if over else min((now - server.queue[0][0]) * 1e-6, replica.max_wait_ms * 0.999999)
            )
            size = batch_size_now(len(server.queue), replica.batch, waited, replica.max_wait_ms)
            if size == 0:
                heapq.heappush(events, (server.queue[0][0] + limit, 4, s))
                return
            process = server.idle.index(True)
            server.begin(size, now)
            end = now + int(replica.batch_latency_ms[size - 1] * 1e6 + 0.5)
            for _ in range(size):
                answered[server.queue.popleft()[1]] = end
            server.idle[process], server.free_at[process] = False, end
            heapq.heappush(events, (end, 1, first_process[s] + process))

    while events:
        now, kind, ident = heapq.heappop(events)
        if kind == 1:
            s = max(i for i in range(len(replicas)) if first_process[i] <= ident)
            servers[s].idle[ident - first_process[s]] = True
            start(s, now)
        elif kind == 2:
            s = rule.choose([server.load(now) for server in servers])
            servers[s].count, servers[s].counted_at = 1.0 + servers[s].count_arrivals(now), now
            servers[s].queue.append((now, ident))
            start(s, now)
        else:
            start(ident, now)
    return answered
