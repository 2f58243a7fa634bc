"""What `load` predicts: its own requests, replayed; and the cores that its clients avoid."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpuprof.domain.deployment import DeploymentMap, PlannedWith, Replica, parse_map, write_map
from gpuprof.domain.host_work import HostWork
from gpuprof.load.load import LoadSettings, RequestStream, send_times
from gpuprof.load.report import LoadPrediction
from gpuprof.machine.cgroup import own_cores
from gpuprof.pipeline.load import predict_load, worker_cores
from tests.command_line import CommandLine
from tests.serving.running import map_of
from tests.serving.running import replica as replica_in_json
from tests.simulator.maps import make_map, replica
from tests.virtual_server import serve

SLO_MS = 300.0
#: Two replicas of one model that do 80 and 50 requests/s, and another model beside them.
PAIR = [replica("m", [30.0, 50.0], max_wait_ms=10.0, cv=0.1), replica("m", [20.0])]
MAP = make_map([PAIR, [replica("n", [10.0], cv=0.2)]], slo_ms=SLO_MS)
SETTINGS = LoadSettings(duration_s=20.0, warmup_s=3.0, seed=7)


def streams(**rates: float) -> list[RequestStream]:
    return [RequestStream(model, rate, SLO_MS) for model, rate in rates.items()]


def predict_model(
    deployment: DeploymentMap, streams: list[RequestStream], settings: LoadSettings = SETTINGS
) -> LoadPrediction:
    return predict_load(deployment, streams, settings)["m"]


def test_the_replay_is_what_simulate_says_of_the_same_requests(tmp_path: Path, cli: CommandLine) -> None:
    requests, whole = streams(m=160.0, n=60.0), replace(SETTINGS, duration_s=23.0, warmup_s=0.0)
    settings = PlannedWith(overhead_ms=1.5, host=HostWork(host_ms=0.5, host_cores=2))
    priced = make_map(
        [[placed.model_copy(update={"sm_share_pct": 30.0}) for placed in (*PAIR, replica("n", [9.0]))]], SLO_MS
    )
    priced = priced.model_copy(update={"planned_with": settings})
    predictions = predict_load(priced, requests, whole)
    sent = zip(requests, send_times(requests, whole), strict=True)
    rows = sorted((float(time), stream.model) for stream, times in sent for time in times)
    trace, map_file = tmp_path / "trace.csv", tmp_path / "map.json"
    trace.write_text("time_s,model\n" + "".join(f"{time:.9f},{model}\n" for time, model in rows))
    write_map(priced, map_file)
    simulated = cli.json("simulate", map_file, "--trace", trace, "--duration 23s --seed 7 --no-fail")
    for model in simulated["models"]:
        predicted = predictions[model["model"]]
        for key in ("p50_ms", "p95_ms", "p99_ms"):
            assert getattr(predicted, key) == model[key]
        assert predicted.goodput_rps == pytest.approx(model["goodput_rps"], rel=1e-12)
        assert predicted.refused == model["missed"]["refused"]
    assert (predictions["m"].refused or 0) > 100


def test_the_model_s_own_time_is_that_of_its_batches_without_their_handover() -> None:
    deployment = make_map([[replica("m", [20.0, 30.0])]], slo_ms=SLO_MS)
    few = streams(m=0.5)
    assert predict_model(deployment, few).infer_ms == pytest.approx(20.0)
    with_handover = deployment.model_copy(update={"planned_with": PlannedWith(host=HostWork(handover_ms=0.5))})
    assert predict_model(with_handover, few).infer_ms == pytest.approx(19.5)
    assert 28.0 < (predict_model(deployment, streams(m=60.0)).infer_ms or 0.0) < 30.0  # most go two by two


@pytest.mark.parametrize("rates", [(40.0, 0), (110.0, 0), (160.0, 200), (390.0, 3000)])
def test_as_many_are_refused_as_the_router_refuses_of_the_same_requests(rates: tuple[float, int]) -> None:
    rate_rps, at_least = rates
    steady = [placed.model_copy(update={"predicted": replica("m", [1.0]).predicted}) for placed in PAIR]
    settings = replace(SETTINGS, warmup_s=0.0)
    requests = streams(m=rate_rps)
    (times_s,) = send_times(requests, settings)
    predicted = predict_model(make_map([steady], slo_ms=SLO_MS), requests, settings)
    refused, goodput_rps, p99_ms = play_requests(steady, times_s.tolist(), settings.duration_s)
    assert refused >= at_least
    assert predicted.refused == pytest.approx(refused, rel=0.02, abs=2)
    assert predicted.goodput_rps == pytest.approx(goodput_rps, rel=0.02)
    assert predicted.p99_ms == pytest.approx(p99_ms, rel=0.05)


def play_requests(replicas: Sequence[Replica], times_s: list[float], duration_s: float) -> tuple[int, float, float]:
    """Play the requests through the router in virtual time: how many it refuses, its goodput and its p99."""
    served = serve(replicas, [1000.0 * time for time in times_s], slo_ms=SLO_MS)
    latencies = np.array(list(served.latencies_ms.values()))
    return served.failed, float((latencies <= SLO_MS).sum()) / duration_s, float(np.quantile(latencies, 0.99))


def test_the_members_of_a_merged_model_get_its_times_and_their_part_of_its_goodput() -> None:
    placed = replica_in_json("both", batch=2, batch_latency_ms=[2.0, 3.0], rate_rps=100.0)
    document = map_of({"both": "null:4"}, [placed], slo_ms=50.0)
    document["models"]["both"]["members"] = {name: {"rate_rps": 50.0, "slo_ms": 50.0} for name in ("m", "n")}
    document["models"]["both"]["rate_rps"] = 100.0
    together = predict_load(parse_map(document, "test"), streams(m=60.0, n=40.0), SETTINGS)
    assert together["m"].goodput_rps == pytest.approx(60.0, rel=0.05)
    assert together["n"].goodput_rps == pytest.approx(40.0, rel=0.05)
    assert together["m"].p99_ms == together["n"].p99_ms


def one_cpu(*shares_pct: float) -> DeploymentMap:
    parts = [replica(f"m{i}", [10.0]).model_copy(update={"sm_share_pct": pct}) for i, pct in enumerate(shares_pct)]
    whole = make_map([parts])
    (node,) = whole.nodes
    cpu = node.gpus[0].model_copy(update={"device": "cpu-some-machine"})
    return whole.model_copy(update={"nodes": (node.model_copy(update={"gpus": (cpu,)}),)})


def test_the_workers_cores_are_those_that_the_server_gives_them() -> None:
    cores = own_cores()
    share = 100.0 / len(cores)
    assert worker_cores(one_cpu(share)) == {cores[0]}
    assert worker_cores(one_cpu(100.0)) == set(cores)
    assert worker_cores(one_cpu(80.0, 80.0)) == frozenset()
    assert worker_cores(make_map([[replica("m", [10.0])]])) == frozenset()  # a GPU
