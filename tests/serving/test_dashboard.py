from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer

pytestmark = serves_in_real_time

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "gpuprof-serve.json"


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
NOT_SHOWN = {
    "gpuprof_replica_share_ratio",
    "gpuprof_requests_retried",
    "gpuprof_worker_refusals",
}
