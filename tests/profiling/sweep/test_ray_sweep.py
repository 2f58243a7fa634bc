"""A sweep spread over the nodes of a Ray cluster."""

import importlib.util
import json
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.kernel_db.store import KernelDb
from tests.profiling.models import write_mlp
from tests.reruns import measures_in_real_time
from tests.serving.ray_cluster import ray_cluster

pytestmark = measures_in_real_time

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: .[ray]")


@needs_ray
@pytest.mark.slow
def test_the_rows_of_both_nodes_land_in_one_database_and_are_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, database = write_mlp(tmp_path / "mlp.onnx"), tmp_path / "db"
    with ray_cluster("place-1", "place-2") as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        sweep = ["profile", str(model), "--batch", "1,2", "--db", str(database), "--time-limit", "0.3", "--json"]
        sweep += ["--engine", "ray", "--device", "cpu", "--share", "100"]
        assert main(sweep) in (0, 2)  # 2: this machine is noisy
        captured = capsys.readouterr()
        assert "2 × cpu-" in captured.err
        rows = [row for row in json.loads(captured.out) if row["model"] == "mlp"]
        assert sorted(row["batch"] for row in rows) == [1, 2]
        models = KernelDb(database).read_table("models").to_pylist()
        assert sorted(row["batch"] for row in models) == [1, 2]
        assert all(row["latency_p50_ms"] > 0.0 for row in models)
        assert {row["run_id"] for row in models} <= set(KernelDb(database).read_table("runs")["run_id"].to_pylist())
        assert KernelDb(database).read_table("ops").num_rows
        assert not list(database.glob(".tmp-*"))
        if all(row["stable"] for row in models):
            assert main(sweep) == 0
            assert json.loads(capsys.readouterr().out or "[]") == []
        bad = tmp_path / "bad.onnx"
        bad.write_bytes(b"rubbish")
        assert main(["profile", str(bad), *sweep[2:]]) == 3
        assert "is not an ONNX model" in capsys.readouterr().err
