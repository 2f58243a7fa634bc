"""Serving without computing: maps for devices that are not here, hundreds of replicas, and overload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.report import ModelResult
from gpuprof.load.target import Target
from tests.reruns import serves_in_real_time
from tests.serving.running import map_of, replica, running, send_until

pytestmark = serves_in_real_time


def test_a_map_of_200_replicas_starts_serves_and_drains(tmp_path: Path) -> None:
    models = {f"m{number}": "nowhere.onnx" for number in range(10)}
    replicas = [
        replica(f"m{number % 10}", batch=4, processes=2, latency_ms=8.0, sm_share_pct=0.5, max_wait_ms=2.0)
        for number in range(200)
    ]
    document = map_of(models, replicas, slo_ms=500.0)
    document["nodes"][0]["gpus"][0]["device"] = "sim:a100-80"
    with running(tmp_path, document) as server:
        assert "serving 10 models with 400 workers" in server.line
        streams = [RequestStream(name, 20.0, 500.0) for name in models]
        outcome = run_load(Target.parse(server.url), streams, LoadSettings(duration_s=1.0, warmup_s=0.2, clients=1))
        assert all(result.answered == result.sent > 0 for result in outcome.results)
        assert all((result.p50_ms or 0.0) >= 4.0 for result in outcome.results)
        code, errors = server.stop()
        assert (code, errors) == (0, "drained\n")


def test_a_map_for_many_machines_is_simulated_whole(tmp_path: Path) -> None:
    document = map_of({"m": "nowhere.onnx"}, [replica("m", latency_ms=2.0)])
    document["nodes"] = [{**document["nodes"][0], "name": f"node{number}"} for number in range(3)]
    document["nodes"][1]["gpus"][0]["device"] = "h100"
    with running(tmp_path, document, "--simulate") as server:
        assert "3 workers" in server.line
        assert server.infer("m", [5.0])[1]["outputs"][0]["data"] == [0.0]


@pytest.mark.slow
def test_at_three_times_its_capacity_a_server_still_does_what_it_can_within_the_slo(tmp_path: Path) -> None:
    latency_ms, slo_ms = 50.0, 1000.0
    document = map_of({"m": "nowhere.onnx"}, [replica("m", batch=4, latency_ms=latency_ms, max_wait_ms=5.0)], slo_ms)
    capacity_rps = 4 * 1000.0 / latency_ms
    with running(tmp_path, document, "--simulate") as server:

        def is_as_it_should_be(results: Sequence[ModelResult]) -> bool:
            (last,) = results
            return last.goodput_rps >= 0.9 * capacity_rps and last.in_slo >= 0.99 * last.answered

        results = send_until(is_as_it_should_be, server, [RequestStream("m", 3.0 * capacity_rps, slo_ms)])
    assert all(result.failed == result.lost == 0 < result.refused for result in results)
    assert is_as_it_should_be(results[-1:])


def test_a_batch_at_hand_behind_another_counts_as_queued(tmp_path: Path) -> None:
    document = map_of({"m": "nowhere.onnx"}, [replica("m", latency_ms=40.0)], slo_ms=60_000.0)
    with running(tmp_path, document, "--simulate") as server:
        target = Target.parse(server.url)
        settings = LoadSettings(duration_s=0.01, warmup_s=0.0, arrivals="constant", clients=1)
        run_load(target, [RequestStream("m", 1000.0, 60_000.0)], settings)  # ten within 10 ms
        statistics = target.statistics("m")
    assert statistics is not None
    queued_ms = statistics["inference_stats"]["queue"]["ns"] / 1e6
    # Each waits for all before it, 40 ms a piece, less the 1 ms that it comes later. 40 ms of each, but for the first,
    # are spent at hand behind another.
    assert queued_ms > 0.85 * sum(39.0 * number for number in range(10))


def test_replicas_that_take_turns_run_one_batch_at_a_time(tmp_path: Path) -> None:
    turns = {"latency_ms": 40.0, "turns": 1}
    replicas = [replica("a", **turns), replica("b", **turns), replica("c", latency_ms=40.0)]
    document = map_of(dict.fromkeys("abc", "nowhere.onnx"), replicas, slo_ms=60_000.0)
    with running(tmp_path, document, "--simulate") as server:
        settings = LoadSettings(duration_s=0.01, warmup_s=0.0, arrivals="constant", clients=1)
        streams = [RequestStream(name, 500.0, 60_000.0) for name in "abc"]  # five of each within 10 ms
        outcome = run_load(Target.parse(server.url), streams, settings)
    a, b, c = outcome.results
    assert all(result.answered == result.sent >= 4 for result in outcome.results)
    server_ms = [model.server_mean_ms or 0.0 for model in (a, b, c)]
    # Of five requests at once the last is answered after 200 ms, of two models by turns after 400.
    assert server_ms[0] + server_ms[1] > 1.5 * 2.0 * server_ms[2] > 0.0
