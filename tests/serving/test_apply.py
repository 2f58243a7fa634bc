"""Moving a running server to another map."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from gpuprof.cli.main import main
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, has_ended, map_of, replica, running
from tests.serving.test_reliability import Askers
from tests.small_models import write_model

pytestmark = serves_in_real_time


def apply(server: RunningServer, path: Path, document: dict[str, Any]) -> int:
    path.write_text(json.dumps(document))
    return main(["apply", str(path), "--port", str(server.port), "--json"])


def test_only_what_changed_is_touched_and_no_request_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"m": "null:4", "gone": "null:4"}
    before = map_of(
        models, [replica("m"), replica("m", max_wait_ms=1.0, sm_share_pct=25.0), replica("gone", sm_share_pct=25.0)]
    )
    after = map_of(
        {"m": "null:4", "new": "null:8"}, [replica("m"), replica("m", batch=4), replica("new", sm_share_pct=25.0)]
    )
    before["nodes"][0]["gpus"][0]["device"] = after["nodes"][0]["gpus"][0]["device"] = "sim:gpu"
    with running(tmp_path, before) as server:
        with Askers(server, "m", 4, [0.0]) as askers:
            time.sleep(0.2)
            assert apply(server, tmp_path / "after.json", after) == 0
            time.sleep(0.2)
        assert askers.lost == askers.wrong == []
        assert set(askers.statuses) == {200}
        changes = {row["replica"]: row["change"] for row in json.loads(capsys.readouterr().out)}
        assert changes == {"m/0": "kept", "m/1": "stopped", "gone/0": "stopped", "m/2": "started", "new/0": "started"}
        assert server.infer("gone", [1.0])[0] == 404
        assert server.infer("new", [1.0, 2.0])[0] == 200
        assert server.get("/v2/models/m/config")[1]["max_batch_size"] == 4
        four = {"name": "INPUT0", "datatype": "FP32", "shape": [4, 1], "data": [1.0, 2.0, 3.0, 4.0]}
        body = json.dumps({"inputs": [four]}).encode()
        for _ in range(4):  # only one of the two replicas holds so many rows
            assert server.get("/v2/models/m/infer", "POST", body)[1]["outputs"][0]["shape"] == [4, 1]


def test_real_workers_change_places_without_a_gap(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        old = server.workers()[0]
        with Askers(server, "m", 4) as askers:
            time.sleep(0.2)
            assert apply(server, tmp_path / "after.json", map_of({"m": "null:4"}, [replica("m", batch=2)])) == 0
            time.sleep(0.2)
        assert askers.lost == askers.wrong == []
        assert set(askers.statuses) == {200}
        assert eventually(lambda: has_ended(old))
        assert len(server.workers()) == 1


def test_a_map_that_cannot_be_served_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        old = server.workers()[0].pid
        (tmp_path / "bad.onnx").write_bytes(b"rubbish")
        assert apply(server, tmp_path / "after.json", map_of({"bad": "bad.onnx"}, [replica("bad")])) == 3
        assert "is not an ONNX model" in capfd.readouterr().err
        assert [worker.pid for worker in server.workers()] == [old]
        assert server.infer("m", [1.0])[0] == 200
        assert server.infer("bad", [1.0])[0] == 404


def test_an_unfit_model_keeps_what_serves_it_and_the_others_move(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def changes() -> dict[str, str]:
        return {row["replica"]: row["change"] for row in json.loads(capfd.readouterr().out)}

    good = write_model(
        tmp_path / "good.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": ["n", 1]}, {"y": ["n", 1]}
    )
    models = {"m": "null:4", "old": str(good), "new": str(tmp_path / "new.onnx")}
    with running(tmp_path, map_of({"m": "null:4", "old": str(good)}, [replica("m"), replica("old")])) as server:
        rubbish = tmp_path / "new.onnx"
        rubbish.write_bytes(b"rubbish")
        models["old"] = models["new"]
        replicas = [replica("m", batch=2, sm_share_pct=25.0), replica("old"), replica("new", sm_share_pct=25.0)]
        assert apply(server, tmp_path / "after.json", map_of(models, replicas)) == 0
        assert changes() == {"m/1": "started", "m/0": "stopped", "old/0": "kept", "old/1": "failed", "new/0": "failed"}
        assert [server.get(f"/v2/models/{name}/ready")[0] for name in models] == [200, 200, 503]
        rubbish.write_bytes(good.read_bytes())
        assert apply(server, tmp_path / "after.json", map_of(models, replicas)) == 0
        assert changes() == {"m/1": "kept", "old/1": "started", "new/0": "started", "old/0": "stopped"}
        assert [server.get(f"/v2/models/{name}/ready")[0] for name in models] == [200, 200, 200]


def test_without_a_server_it_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(map_of({"m": "null:4"}, [replica("m")])))
    assert main(["apply", str(path), "--port", "1"]) == 1
    assert "no server of yours listens on port 1" in capfd.readouterr().err
