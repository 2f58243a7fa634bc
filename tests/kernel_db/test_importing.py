import json
from pathlib import Path

import pytest

from gpuprof.errors import InputError
from gpuprof.kernel_db.importing import import_files, split_form
from gpuprof.kernel_db.store import KernelDb
from tests.kernel_db.rows import assert_sound

PARVAGPU = (
    "Mig instance,Batch size,Workload Number,Throughput,Latency\n1,1,1,74.408,0.013\n3,8,2,52.42,0.019\n7,256,5,0,0\n"
)
THESIS = (
    "model,batch,latency_s,throughput_rps,mem_capacity_pct,achieved_occupancy_pct,weighted_achieved_occupancy_pct,"
    "weighted_sm_utilization_pct\nalexnet,4,0.0014,2801.75,1.66,69.17,18.68,47.07\ninception,128,0.0813,1574.14,15.94,,,\n"
)
MATRIX = [[3.0, 2.0, 1.0], [6.0, 4.0, 2.0], [9.0, 6.0, 3.0]]
PROFILE = "\n".join(
    json.dumps(line)
    for line in (
        {"hardware": {"idlepower": 53.5, "maxGPUpower": 300, "maxGPUfrequency": 1530}},
        {"alexnet": {"inputdata": 600, "outputdata": 40, "gpulatency": MATRIX, "power": MATRIX, "frequency": MATRIX}},
        {"alexnet": {"l2caches": [2.6, 16.2, 29.5], "idletime_1": 0.03, "activetime_1": 3.6, "activetime_2": 3.9}},
    )
)
ANALYZER = (
    "Model,Batch,Concurrency,Model Config Path,Instance Group,Satisfies Constraints,Throughput (infer/sec),"
    'p99 Latency (ms)\nresnet,8,2,resnet_config_0,2:KIND_GPU,Yes,"1,234.5",12.5\n'
)


def _import(path: Path, name: str, content: str, device: str | None = None) -> KernelDb:
    (path / name).write_text(content)
    database = KernelDb.create(path / "db")
    import_files(database, [path / name], device)
    assert_sound(database)
    return database


def test_parvagpus_throughput_is_of_all_processes_and_out_of_memory_is_no_zero(tmp_path: Path) -> None:
    rows = _import(tmp_path, "bert.csv", PARVAGPU).read_table("models").to_pylist()
    assert [(row["model"], row["device"], row["mig_profile"], row["processes"]) for row in rows] == [
        ("bert", "a100-80", "1g.10gb", 1),
        ("bert", "a100-80", "3g.40gb", 2),
        ("bert", "a100-80", "7g.80gb", 5),
    ]
    assert [row["throughput_rps"] for row in rows] == [74.408, 104.84, None]
    assert rows[0]["latency_mean_ms"] == pytest.approx(1000.0 / 74.408)  # published as 0.013 s
    assert rows[2]["error"] == "out of memory"


@pytest.mark.parametrize(
    ("latency", "throughput", "expected"),
    [("0.002", "805.53", 2000.0 / 805.53), ("0.0613", "33", 61.3), ("0.013", "", 13.0), ("", "100.0", 20.0)],
)
def test_the_figure_with_more_digits_counts(tmp_path: Path, latency: str, throughput: str, expected: float) -> None:
    header = THESIS.splitlines()[0]
    table = f"{header}\nvgg19,2,{latency},{throughput},1.66,69.17,18.68,47.07\n"
    (row,) = _import(tmp_path, "v100.csv", table).read_table("models").to_pylist()
    assert row["latency_mean_ms"] == pytest.approx(expected)


def test_the_theses_table_keeps_the_three_metrics_and_its_gaps(tmp_path: Path) -> None:
    rows = _import(tmp_path, "v100.csv", THESIS).read_table("models").to_pylist()
    assert (rows[0]["max_occupancy_pct"], rows[0]["wavg_occupancy_pct"], rows[0]["wavg_sm_util_pct"]) == (
        69.17,
        18.68,
        47.07,
    )
    assert rows[0]["memory_peak_bytes"] == round(0.0166 * 16 * 2**30)
    assert rows[1]["max_occupancy_pct"] is None


def test_igniters_profile_keeps_every_raw_figure(tmp_path: Path) -> None:
    database = _import(tmp_path, "config.jsonl", PROFILE)
    rows = {(row["batch"], row["sm_share_pct"]): row for row in database.read_table("models").to_pylist()}
    assert len(rows) == 9
    assert rows[16, 50.0]["latency_mean_ms"] == 4.0
    assert rows[16, 50.0]["l2_pct"] == 16.2 and rows[16, 50.0]["dispatch_ms"] == 0.03
    assert rows[1, 50.0]["l2_pct"] is None
    assert rows[32, 10.0]["h2d_bytes"] == 19200
    assert database.read_table("devices").to_pylist()[0]["idle_power_w"] == 53.5
    assert database.read_table("colocations").column("latency_mean_ms").to_pylist() == [3.9, 3.9]
    (settings,) = database.read_table("runs", ["settings"]).column("settings").to_pylist()
    assert json.loads(settings)["hardware"]["idlepower"] == 53.5


def test_model_analyzers_table_needs_the_device(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not say which device .*\(say so with --device\)"):
        _import(tmp_path, "metrics-model-inference.csv", ANALYZER)
    (row,) = _import(tmp_path, "metrics-model-inference.csv", ANALYZER, "l4").read_table("models").to_pylist()
    assert (row["throughput_rps"], row["latency_p99_ms"], row["processes"], row["device"]) == (1234.5, 12.5, 2, "l4")


def test_every_import_says_where_it_comes_from_and_is_done_once(tmp_path: Path) -> None:
    database = _import(tmp_path, "bert.csv", PARVAGPU)
    (run,) = database.read_table("runs").to_pylist()
    assert run["source"].endswith("bert.csv") and len(run["source_sha256"]) == 64 and "more digits" in run["notes"]
    (again,) = import_files(database, [tmp_path / "bert.csv"])
    assert (again.rows, again.note) == (0, "there already")


def test_a_directory_is_imported_and_what_is_unknown_in_it_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.csv").write_text(PARVAGPU)
    (folder / "slo.csv").write_text("6434,183\n")
    imported = import_files(KernelDb.create(tmp_path / "db"), [folder])
    assert [(each.form, each.rows) for each in imported] == [("parvagpu", 3), ("", 0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("hello\n", "has no form that is known"),
        ("", "has no form that is known"),
        (PARVAGPU + "1,2,1,x,0.1\n", ":5: Throughput must be a number"),
        (PARVAGPU + "1,2,1,-5,0.1\n", ":5: Throughput must be a number, not negative"),
        (PARVAGPU + "1,2,1,nan,0.1\n", ":5: Throughput is missing"),
        (PARVAGPU + "1,2,1,inf,0.1\n", ":5: Throughput must be a number"),
        (PARVAGPU + "5,2,1,5,0.1\n", ":5: MIG size 5 is none of"),
        (PARVAGPU + "1,2\n", ":5: 2 fields where the header has 5"),
        (PROFILE + "\nnot json\n", ":4: not a line of an iGniter profile"),
        ('{"alexnet": {"inputdata": 1}}\n', "lacks or garbles 'gpulatency'"),
    ],
)
def test_a_bad_file_is_refused_with_its_line_and_changes_nothing(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "good.csv").write_text(PARVAGPU)
    (tmp_path / "bad.csv").write_text(content)
    with pytest.raises(InputError) as caught:
        import_files(KernelDb.create(tmp_path / "db"), [tmp_path / "good.csv", tmp_path / "bad.csv"])
    assert message in str(caught.value)
    assert not (tmp_path / "db").exists()


def test_a_form_may_be_named_before_the_files() -> None:
    assert split_form([Path("thesis"), Path("a.csv")]) == ("thesis", [Path("a.csv")])
    assert split_form([Path("a.csv")]) == (None, [Path("a.csv")])
