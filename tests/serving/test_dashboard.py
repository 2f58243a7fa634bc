from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.serving.running import RunningServer

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "gpuprof-serve.json"


def test_the_dashboard_asks_only_for_what_the_server_says(null_server: RunningServer) -> None:
    null_server.infer("small", [1.0])
    text = null_server.get("/metrics")[1].decode()
    known = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"gpuprof_\w+", target["expr"])
    }
    assert asked <= known
    assert len(asked) > 7
