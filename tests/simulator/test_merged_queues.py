from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuprof.cli.main import main
from gpuprof.domain.map_file import parse_map
from gpuprof.errors import InputError
from gpuprof.simulator.merged_queues import merged_queues
from gpuprof.simulator.trace import Trace


def _replica(model: str, rate: float, **more: Any) -> dict[str, Any]:
    predicted = {"latency_ms": 2.0, "throughput_rps": 1000.0, "goodput_rps": rate}
    times = {"batch": 2, "batch_latency_ms": [1.0, 2.0]}
    return {"model": model, "sm_share_pct": 50.0, "rate_rps": rate, "predicted": predicted, **times, **more}


def _map(*more: dict[str, Any]) -> dict[str, Any]:
    merged = [{"model": name, "rate_rps": rate, "goodput_rps": rate} for name, rate in (("a", 30.0), ("b", 10.0))]
    replicas = [_replica("ab", 40.0, merged=merged), *more]
    slos = {"a": 50.0, "b": 20.0, "c": 90.0}
    return {
        "schema": "gpuprof.deployment/1",
        "policy": "by hand",
        "models": {n: {"rate_rps": 30.0 if n == "a" else 10.0, "slo_ms": slo} for n, slo in slos.items()},
        "nodes": [{"name": "n", "gpus": [{"index": 0, "device": "cpu", "partitions": [{"replicas": replicas}]}]}],
        "predicted": {"gpus": 1, "goodput_rps": 50.0},
        "merges": {"ab": {"path": "ab.onnx", "members": {"a": "a", "b": "b"}}},
    }


def test_models_of_one_queue_become_one_with_their_rates_together_and_the_tightest_slo() -> None:
    queues = merged_queues(parse_map(_map(_replica("c", 10.0)), "map"))
    assert set(queues.deployment.models) == {"ab", "c"}
    assert queues.deployment.models["ab"].rate_rps == 40.0
    assert queues.deployment.models["ab"].slo_ms == 20.0
    assert not queues.deployment.merges
    assert queues.rates(parse_map(_map(), "map"), {"a": 5.0, "c": 1.0}) == {"ab": 15.0, "c": 1.0}


def test_a_trace_is_told_by_queue_in_order_of_time() -> None:
    queues = merged_queues(parse_map(_map(), "map"))
    times = {"a": np.array([1, 5, 9]), "b": np.array([2, 7]), "c": np.array([3])}
    found = queues.trace(Trace(times, 1.0)).times
    assert set(found) == {"ab", "c"}
    assert found["ab"].tolist() == [1, 2, 5, 7, 9]


def test_a_model_that_also_stands_alone_is_refused() -> None:
    with pytest.raises(InputError, match="a is served by the merge ab and by a"):
        merged_queues(parse_map(_map(_replica("a", 5.0)), "map"))


def test_the_requests_of_all_merged_models_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(_map(_replica("c", 10.0))))
    assert main(["simulate", str(path), "--duration", "50s", "--json"]) == 0
    said = capsys.readouterr()
    assert "one queue" in said.err
    rates = {model["model"]: model["rate_rps"] for model in json.loads(said.out)["models"]}
    assert set(rates) == {"ab", "c"}
    assert rates["ab"] == pytest.approx(40.0, rel=0.15)
    assert main(["simulate", str(path), "--reschedule", "10s"]) == 3
    assert "place without --merge" in capsys.readouterr().err
