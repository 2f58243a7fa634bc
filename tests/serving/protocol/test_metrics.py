"""What /metrics says by model, replica, device and MIG instance."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, map_of, replica, running

pytestmark = serves_in_real_time


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            by_name.setdefault(sample.name, []).append((sample.labels, sample.value))
    return by_name


def total(rows: list[tuple[dict[str, str], float]], **wanted: str) -> float:
    return sum(value for labels, value in rows if wanted.items() <= labels.items())


def test_figures_are_told_apart_by_model_replica_and_mig_instance(tmp_path: Path) -> None:
    document = map_of({"a": "null:4", "b": "null:4", "c": "null:4"}, [])
    partitions = [
        {"mig": {"profile": "3g.40gb", "start": 0}, "replicas": [replica("a", sm_share_pct=60.0), replica("b")]},
        {"mig": {"profile": "3g.40gb", "start": 4}, "replicas": [replica("c", sm_share_pct=100.0)]},
    ]
    document["nodes"][0]["gpus"] = [{"index": 0, "device": "sim:a100-80", "partitions": partitions}]
    partitions[0]["replicas"][1]["sm_share_pct"] = 40.0  # type: ignore[index]
    with running(tmp_path, document) as server:
        for model in "aaaabcc":
            assert server.infer(model, [1.0])[0] == 200
        metrics = samples(server.get("/metrics")[1].decode())
    assert total(metrics["gpuprof_requests_total"], model="a", outcome="in_slo") == 4
    by_replica = metrics["gpuprof_replica_requests_total"]
    assert {labels["mig"] for labels, _ in by_replica} == {"3g.40gb@0", "3g.40gb@4"}
    slowed = {
        (labels["model"], labels["beside"]): value for labels, value in metrics["gpuprof_neighbour_slowdown_ratio"]
    }
    assert set(slowed) == {("a", "b"), ("b", "a")} and min(slowed.values()) > 0.0
    assert total(by_replica, mig="3g.40gb@0", outcome="in_slo") == 5
    assert total(by_replica, mig="3g.40gb@4", place="n/sim:a100-80:0", outcome="in_slo") == 2
    assert total(metrics["gpuprof_replica_share_ratio"], mig="3g.40gb@0") == 1.0
    assert total(metrics["gpuprof_replica_busy_seconds_total"], mig="3g.40gb@4") > 0.0
    assert total(metrics["gpuprof_replica_share_ratio"], replica="a/0") == 0.6
    assert total(metrics["gpuprof_replica_planned_rps"], replica="a/0") == 50.0


def test_stages_have_histograms(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m", latency_ms=20.0)]), "--simulate") as server:
        assert server.infer("m", [1.0])[0] == 200
        metrics = samples(server.get("/metrics")[1].decode())
    buckets = metrics["gpuprof_stage_latency_seconds_bucket"]
    assert total(buckets, stage="infer", le="0.01") == 0
    assert total(buckets, stage="infer", le="0.05") == total(buckets, stage="infer", le="+Inf") == 1
    assert total(metrics["gpuprof_stage_latency_seconds_count"], stage="queue") == 1
    assert 0.019 < total(metrics["gpuprof_stage_latency_seconds_sum"], stage="infer") < 0.03
    assert total(metrics["gpuprof_replica_latency_seconds_count"], replica="m/0") == 1


def test_what_the_router_expects_and_what_it_refused_are_told_with_the_reason(tmp_path: Path) -> None:
    planned = replica("m", batch=2, batch_latency_ms=[20.0, 30.0])
    with running(tmp_path, map_of({"m": "null:4"}, [planned]), "--simulate", "--grpc-port", "0") as server:
        assert server.infer("m", [1.0, 2.0])[0] == 400
        assert server.get("/v2/models/nobody")[0] == 404
        metrics = samples(server.get("/metrics")[1].decode())
    estimates = metrics["gpuprof_batch_estimate_seconds"]
    assert {(labels["replica"], labels["size"], value) for labels, value in estimates} == {
        ("m/0", "1", 0.02),
        ("m/0", "2", 0.03),
    }
    refused = {
        (labels["protocol"], labels["status"], labels["reason"]): n
        for labels, n in metrics["gpuprof_refused_requests_total"]
    }
    assert refused == {("http", "400", "bad request"): 1, ("http", "404", "not found"): 1}
    assert total(metrics["gpuprof_edge_restarts_total"]) == 0


DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "gpuprof-serve.json"


SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}


def test_the_dashboard_asks_only_for_what_the_server_says(null_server: RunningServer) -> None:
    for model, size in (("small", 1), ("large", 150_000)):
        assert null_server.infer(model, [1.0] * size)[0] == 200
    null_server.get("/nowhere")
    text = null_server.get("/metrics")[1].decode()
    families = list(text_string_to_metric_families(text))
    served = {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    queried = {name for expression in expressions for name in re.findall(r"gpuprof_\w+", expression)}
    assert queried <= served
    assert {name.removesuffix("_bucket").removesuffix("_total") for name in queried} >= {
        family.name for family in families if family.name not in NOT_SHOWN
    }
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    grouped = {label for e in expressions for group in re.findall(r"by \(([^)]*)\)", e) for label in group.split(", ")}
    assert grouped <= labels


#: Parts of others that are shown, or of use to those who look for the cause of something.
NOT_SHOWN = {"gpuprof_requests_retried", "gpuprof_worker_refusals"}
