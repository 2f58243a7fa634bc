import json
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from gpuprof.cli.main import main
from gpuprof.kernel_db.store import KernelDb
from tests.profiling.models import write_convs
from tests.reruns import measures_in_real_time
from tests.small_models import write_model

pytestmark = measures_in_real_time

QUICK = ["--share", "100", "--time-limit", "0.4"]


@pytest.fixture(autouse=True)
def _here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What serving costs has tests of its own.
    monkeypatch.setattr("gpuprof.pipeline.profile.measure_serving", lambda database, device, note: None)


@pytest.mark.slow
def test_a_model_is_profiled_and_the_second_time_remembered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_convs(tmp_path / "convs.onnx")
    code = main(["profile", "convs.onnx", "--batch", "1,2", *QUICK, "--json"])
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert code in (0, 2)  # a noisy machine is told, and the rows are kept all the same
    assert [row["batch"] for row in rows] == [1, 2]
    assert all(row["latency_p50_ms"] > 0 and row["memory_peak_bytes"] > 0 and row["measured_now"] for row in rows)
    database = KernelDb(tmp_path / "gpuprof-db")
    assert database.read_table("ops").num_rows == 14
    ceilings = database.read_table("devices", where={"measured": True}).to_pylist()
    assert [row["sm_share_pct"] for row in ceilings] == [100.0]
    assert set(database.read_table("models").column("stable").to_pylist()) <= {True, False}
    main(["profile", "convs.onnx", "--batch", "1,2", *QUICK])
    again = capsys.readouterr()
    kept = sum(row["stable"] for row in rows)
    assert f"{kept} of 2 were measured before" in again.err or kept == 0
    assert "requests/s" in again.out


@pytest.mark.slow
def test_a_model_that_mixes_the_items_of_a_batch_is_said_to_and_placed_with_batches_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dims: list[int | str | None] = ["N", 64]
    nodes = [helper.make_node("Softmax", ["x"], ["s"], axis=0), helper.make_node("MatMul", ["s", "w"], ["y"])]
    write_model(tmp_path / "mixer.onnx", nodes, {"x": dims}, {"y": dims}, {"w": np.ones((64, 64), np.float32)})
    for _ in range(2):  # the second time nothing is measured, and it is said again
        main(["profile", "mixer.onnx", "--batch", "1,4", *QUICK])
        stderr = capsys.readouterr().err
        assert "mixer mixes the items of a batch: its output y for one depends on the others" in stderr
    (tmp_path / "slo.csv").write_text("model,rate_rps,slo_ms\nmixer,10,500\n")
    assert main(["place", "--db", "gpuprof-db", "--json"]) == 0
    shown = capsys.readouterr()
    assert "it is placed with batches of 1" in shown.err
    assert {replica["batch"] for replica in json.loads(shown.out)["replicas"]} == {1}
