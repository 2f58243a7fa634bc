from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import helper

from gpuprof.cli.main import main
from gpuprof.cli.maps import group_equal
from gpuprof.domain.deployment import read_map
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.store import COPIES
from gpuprof.runtime.free_batch import ensure_dynamic_batch
from tests.estimators.rows import database, measured_row
from tests.small_models import floats, write_model

SOUND = "model,rate_rps,slo_ms\nnet,20,100\n"
NETS = {"net": (4.0, 2.0), "other": (10.0, 5.0)}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [
        measured_row(
            model, batch, (start + batch * each) * 100.0 / share, device="v100", share=share, path=f"{model}.onnx",
            sha256="0" * 64, repeats=100, std_ms=0.1, memory=2**30,
        )
        for model, (start, each) in NETS.items()
        for batch in (1, 4)
        for share in (50.0, 100.0)
    ]  # fmt: skip
    database(tmp_path / "gpuprof-db", rows)
    (tmp_path / "slo.csv").write_text(SOUND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUPROF_DB", raising=False)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    return tmp_path


def test_bare_it_plans_for_the_profiled_device_and_writes_a_sound_map(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["place"]) == 0
    output = capsys.readouterr().out
    assert "1 × v100 (" in output and "/h), proven minimum. 20 of 20 requests/s within SLO. Unused: " in output
    placed = read_map(here / "map.json")
    assert placed.models["net"].path == "net.onnx"
    assert placed.created is None
    assert main(["check"]) == 0
    assert capsys.readouterr().out == "map.json is sound: 1 replica on 1 device\n"


def test_the_same_input_gives_the_same_bytes(here: Path) -> None:
    maps = []
    for name in ("one.json", "two.json"):
        assert main(["place", "-o", name]) == 0
        maps.append((here / name).read_bytes())
    assert maps[0] == maps[1]


def test_a_demand_that_cannot_be_met_is_named_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "slo.csv").write_text(SOUND + "other,5,3\n")
    assert main(["place"]) == 1
    stderr = capsys.readouterr().err
    assert "other: 5 requests/s cannot be served" in stderr
    assert "the least SLO that works is" in stderr
    assert not (here / "map.json").exists()


def test_with_best_effort_the_rest_is_placed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "slo.csv").write_text(SOUND + "other,5,3\n")
    assert main(["place", "--best-effort"]) == 1
    placed = read_map(here / "map.json")
    assert [shortfall.model for shortfall in placed.unplaced] == ["other"]
    assert [replica.model for *_, replica in placed.places()] == ["net"]
    assert main(["check"]) == 0
    assert main(["check", "--against", "slo.csv"]) == 1
    assert "other" in capsys.readouterr().out


def test_programs_get_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", "--json", "--gpus", "v100:2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["predicted"]["gpus"] == 1
    assert printed["replicas"][0]["model"] == "net"
    assert main(["check", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert (checked["map"], checked["sound"], checked["violations"]) == ("map.json", True, [])
    assert checked["basis"] == printed["basis"] and [source["kind"] for source in printed["basis"]["sources"]] == [
        "measured"
    ]
    assert main(["simulate", "--json", "--duration", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["basis"] == printed["basis"]
    assert main(["compare", "--json", "--policies", "ffd", "--gpus", "v100:2"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["sources"] == "1 replica (100% of the requests) measured" and row["gpus_at_upper_ends"] is None


def test_policies_are_compared_in_a_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--policies", "ffd,optimal,parvagpu", "--csv"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("policy,gpus,cost_per_hour,goodput_rps")
    assert [row.split(",")[0] for row in rows] == ["ffd", "optimal", "parvagpu"]
    assert "needs a device with MIG" in rows[2]


def test_a_model_of_the_map_is_explained(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place"]) == 0
    assert main(["explain", "map.json", "net"]) == 0
    output = capsys.readouterr().out
    assert "net: 20 requests/s, 99% of them within 100 ms" in output
    assert "10% less SLO" in output
    assert main(["explain", "map.json", "net", "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("device,share,batch,processes,capacity_rps") and len(lines) > 1
    assert main(["explain", "map.json", "net", "--csv", "--json"]) == 3
    assert main(["explain", "map.json", "nett"]) == 3
    assert "unknown model of the map 'nett' (did you mean net?)" in capsys.readouterr().err


def test_what_neighbours_add_to_a_batch_is_told_with_what_it_stands_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "slo.csv").write_text(f"{SOUND}other,5,500\n")
    assert main(["place", "--gpus", "v100:1"]) == 0
    capsys.readouterr()
    assert main(["explain", "map.json", "net", "--json"]) == 0
    (effect,) = json.loads(capsys.readouterr().out)["neighbours"]
    # nothing was measured beside anything: the time is that of the replica alone, up to a third more is possible
    assert effect["neighbour"].startswith("other ") and effect["basis"] == "no measurement"
    assert effect["added_ms"] == 0.0 and effect["interval_ms"][1] > 1.3 * effect["alone_ms"]
    assert main(["explain", "map.json", "net"]) == 0
    assert "What each neighbour adds to the time of a batch:" in capsys.readouterr().out


def test_place_names_the_file_that_it_wrote_or_replaced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place"]) == 0
    captured = capsys.readouterr()
    assert "gpuprof: wrote map.json" in captured.err
    assert "Sure of its times: all measured, planned at the means." in " ".join(captured.out.split())
    assert main(["place", "--confidence", "0.9"]) == 0
    captured = capsys.readouterr()
    assert "gpuprof: replaced map.json" in captured.err
    assert "planned at the upper ends of 90% intervals." in " ".join(captured.out.split())


def test_explain_and_report_find_the_map(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place"]) == 0
    capsys.readouterr()
    assert main(["explain", "net", "--csv"]) == 0
    named = capsys.readouterr().out
    assert main(["explain", "--csv"]) == 0
    assert main(["explain", "map.json", "net", "--csv"]) == 0
    assert capsys.readouterr().out == 2 * named
    assert main(["report"]) == 0
    assert (here / "report.html").is_file()


def test_a_map_is_exported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place"]) == 0
    capsys.readouterr()
    assert main(["export", "--to", "mig-parted"]) == 0
    assert capsys.readouterr().out.startswith("version: v1\nmig-configs:\n")
    assert main(["export", "--to", "mig-parted", "-o", "layout"]) == 0
    assert "1 file for mig-parted written to layout" in capsys.readouterr().err
    assert main(["export", "--to", "triton"]) == 3
    assert main(["export", "--to", "triton", "-o", "repository"]) == 0
    assert (here / "repository" / "node0-gpu0-net" / "net" / "config.pbtxt").is_file()
    assert main(["export"]) == 0  # a map without MIG instances
    assert (here / "export-triton" / "node0-gpu0-net" / "net" / "config.pbtxt").is_file()


def test_a_map_that_no_machine_could_set_up_is_not_exported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place"]) == 0
    text = json.loads((here / "map.json").read_text())
    (gpu,) = text["nodes"][0]["gpus"]
    gpu["device"] = "a100-80"
    gpu["partitions"] = [
        dict(gpu["partitions"][0], mig={"profile": profile, "start": start})
        for profile, start in (("3g.40gb", 0), ("2g.20gb", 2))
    ]
    (here / "map.json").write_text(json.dumps(text))
    capsys.readouterr()
    assert main(["export", "--to", "mig-parted"]) == 3
    assert "map.json cannot be set up: geometry: node0 gpu 0: 3g.40gb and 2g.20gb overlap" in capsys.readouterr().err


def test_a_file_that_fixes_its_batch_is_placed_as_the_copy_that_was_profiled_in_its_place(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = floats(8, 4)
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    write_model(here / "fixed.onnx", [product], {"x": [4, 8]}, {"y": [4, 4]}, {"w": weight})
    (here / "slo.csv").write_text("model,rate_rps,slo_ms\nfixed.onnx,20,100\n")
    assert main(["place", "--gpus", "v100"]) == 3
    assert "takes batches of 4 only" in capsys.readouterr().err
    copy = ensure_dynamic_batch(here / "fixed.onnx", here / "gpuprof-db" / COPIES)
    sha256 = load_graph(copy).sha256
    rows = [
        measured_row("fixed", batch, 3.0 + batch, device="v100", path=str(copy), sha256=sha256, repeats=10, std_ms=0.1)
        for batch in (1, 4)
    ]
    database(here / "gpuprof-db", rows, run_id="r2")
    assert main(["place", "--gpus", "v100"]) == 0
    placed = read_map(here / "map.json")
    assert (here / str(placed.models["fixed"].path)).samefile(copy)
    assert "measured" in capsys.readouterr().out


def test_equal_mistakes_are_one_line_with_their_number() -> None:
    same = [{"rule": "slo", "where": place, "message": "m"} for place in ("a", "a", "b")]
    rate_violation = {"rule": "rate", "where": "a", "message": "m"}
    assert group_equal([*same, rate_violation]) == [
        {"rule": "slo", "where": "a, b", "times": 3, "message": "m"},
        {"rule": "rate", "where": "a", "times": 1, "message": "m"},
    ]
