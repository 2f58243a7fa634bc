import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow
from gpuprof.kernel_db.store import KernelDb
from gpuprof.pipeline import calibrate as fit
from tests.command_line import CommandLine
from tests.estimators.rows import CPU, database, measured_row, two_layers
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time

TRAFFIC = {"a": 20.0, "b": 50.0, "c": 80.0}


def _write_pairs(folder: Path) -> str:
    """Write pairs of three models, each slowed down by a fifth of the bandwidth that the other draws."""
    models = [replace(measured_row(name, 1, 10.0, share=50.0), dram_pct=drawn) for name, drawn in TRAFFIC.items()]
    rows = [
        ColocationRow("r1", CPU.name, group, 0, victim, 1, f"{neighbour}:1:50%", 50.0,
                      latency_mean_ms=10.0 * (1.0 + 0.2 * TRAFFIC[neighbour] / 100.0), solo_latency_mean_ms=10.0,
                      dram_pct=TRAFFIC[victim])
        for group, (victim, neighbour) in enumerate((v, o) for v in TRAFFIC for o in TRAFFIC)
    ]  # fmt: skip
    database(folder / "db", models, [device_row()], rows)
    return str(folder / "db")


def device_row() -> DeviceRow:
    return DeviceRow("r1", CPU.name, "cpu", compute_units=4, dram_bytes=2**33, dram_bytes_per_s=1e10,
                     float32_flops_per_s=1e11, measured=True, source="test")  # fmt: skip


def test_models_of_interference_are_judged_by_what_was_colocated_and_used(tmp_path: Path, cli: CommandLine) -> None:
    db = _write_pairs(tmp_path)
    ranked = cli.json("calibrate --db", db)
    assert ranked[0]["interference"] == "traffic" and ranked[0]["mean_pct"] < 0.1
    assert next(row for row in ranked if row["interference"] == "none")["mean_pct"] > 5.0
    words = ["estimate", "a", "--db", db, "--share", "50", "--beside", "b@1:25", "--beside", "c@1:25", "--json"]
    (row,) = json.loads(cli(*words).out)
    assert row["latency_source"] == "measured × traffic (beyond what was co-located: the number of neighbours)"
    assert 10.0 < row["latency_ms"] <= 10.0 * (1.0 + 0.2 * 1.3) + 0.05


def test_nothing_colocated_is_one_clear_line(tmp_path: Path, cli: CommandLine) -> None:
    database(tmp_path / "db", [measured_row("a", 1, 1.0)], [device_row()])
    stderr = cli("calibrate --db", tmp_path / "db", code=3).err
    assert "too little was co-located on cpu-test-4c" in stderr and stderr.count("\n") == 1


def _profile(path: Path) -> Path:
    """Write a GPU and a model that obey iGniter's equations, as its tools write them."""
    batches, shares = (1, 16, 32), (0.1, 0.5, 1.0)
    active = [[0.5 * batch / share + 1.0 for share in shares] for batch in batches]
    hardware = {"maxGPUpower": 300, "maxGPUfrequency": 1530, "idlepower": 50, "bandwidth": 1e7, "unit": 2.5,
                "power": [150, 250, 299, 300, 300], "frequency": [1530, 1530, 1530, 1480, 1430],
                "idletime": [0.001, 0.0015, 0.006, 0.011, 0.016]}  # fmt: skip
    net = {"gpulatency": [[ms + 0.05 for ms in row] for row in active], "power": [[80.0] * 3] * 3,
           "frequency": [[1530.0] * 3] * 3, "l2caches": [5.0, 6.0, 7.0], "inputdata": 600000, "outputdata": 4000,
           "kernel": 50, "idletime_1": 0.05, "activetime_1": 17.0, "activetime_2": 17.5, "frequency_2": 1530,
           "l2cache": 6.0}  # fmt: skip
    path.write_text("\n".join(json.dumps(section) for section in ({"hardware": hardware}, {"net": net})))
    return path


def test_an_imported_profile_is_fitted_and_kept_where_estimates_find_it(tmp_path: Path, cli: CommandLine) -> None:
    db = str(tmp_path / "db")
    cli("db import", _profile(tmp_path / "config.jsonl"), "--device v100 --db", db)
    share = ["--db", db, "--device", "v100", "--share", "30", "--batch", "16"]
    beside = [word for _ in range(3) for word in ("--beside", "net@16:20")]
    (before,) = cli.json("estimate net", *share, *beside)
    assert "alpha_f" in cli("calibrate --db", db, "--device v100").out
    (after,) = cli.json("estimate net", *share, *beside)
    assert after["latency_source"].endswith("× igniter") and after["latency_ms"] > before["latency_ms"]
    assert after["latency_low_ms"] < after["latency_ms"] < after["latency_high_ms"]


@pytest.mark.slow
def test_models_are_colocated_for_real_on_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(two_layers(tmp_path / "one.onnx", 256))
    words = ["calibrate", model, "--db", str(tmp_path / "db"), "--device", "cpu", "--time-limit", "0.1"]
    code = main(words)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "8 measured, 0 were there before, 0 failed" in captured.err
    assert "none" in captured.out and "traffic" in captured.out
    rows = KernelDb(tmp_path / "db").read_table("colocations").to_pylist()
    assert sorted(row["beside"].count(" + ") + 2 for row in rows) == [2] * 4 + [3] * 3 + [4] * 4
    assert all(row["latency_mean_ms"] > 0.0 and row["solo_latency_mean_ms"] > 0.0 for row in rows)


def test_quick_networks_scale_the_others(tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_QUICK_NETWORKS", ("mlp", "transformer_encoder"))
    db = str(tmp_path / "db")
    rows = cli.json("calibrate --quick --device cpu --db", db, "--time-limit 0.2s")
    assert [row["of"] for row in rows] == ["mlp", "transformer_encoder"]
    assert all(row["coefficient"] == "measured / predicted" and row["value"] > 0.0 for row in rows)
    path = two_layers(tmp_path / "other.onnx")
    widths = []
    for words in ([], ["--db", db]):
        (row,) = cli.json("estimate", path, "--device cpu", *words)
        widths.append(row["latency_high_ms"] / row["latency_low_ms"])
    assert widths[0] != widths[1]
