"""The engine: event order, conservation, failures, bounds, the same rules as the runtime, and queueing theory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence

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
from gpuprof.errors import InputError
from gpuprof.rules.routing import FastestFirst
from gpuprof.simulator import engine
from gpuprof.simulator.cluster import Failure, SimulationOptions, parse_failure
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.outcome import ModelOutcome, SimulationOutcome
from tests.simulator.maps import at, make_map, replica
from tests.simulator.reference import play


def outcome(
    replicas: Sequence[Replica], *milliseconds: float, slo_ms: float = 1e6, options: SimulationOptions | None = None
) -> ModelOutcome:
    """Each replica on a GPU of its own, and one model."""
    result = simulate(
        make_map([[r] for r in replicas], slo_ms), {"m": at(*milliseconds)}, options or SimulationOptions(1.0)
    )
    return result.models[0]


def test_a_lone_request_takes_the_service_time() -> None:
    result = outcome([replica("m", [5.0])], 0.0)
    assert (result.mean_ms, result.p50_ms, result.max_ms) == (5.0, 5.0, 5.0)


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
@given(
    replicas=st.lists(_replicas, min_size=1, max_size=9),
    gaps=st.lists(st.integers(0, 8), min_size=1, max_size=40),
)
def test_the_engine_does_what_the_rules_of_the_runtime_say(replicas: list[Replica], gaps: list[int]) -> None:
    times = (np.cumsum(gaps) * 250_000).tolist()
    expected = play(replicas, times, FastestFirst())
    result = simulate(
        make_map([[r] for r in replicas]),
        {"m": RecordedArrivals(np.array(times), 1.0)},
        SimulationOptions(1.0),
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
        2.0,
        warmup_s=0.25,
        seed=seed,
        legs_ms={"a": (0.2, 0.1)},
        failures=(Failure("node0", 1, 0.8, 0.5),),
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
