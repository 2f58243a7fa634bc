import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2

from gpuprof.cli.main import main
from gpuprof.cli.maps import group_equal
from gpuprof.domain.deployment import read_map
from gpuprof.domain.share import Share
from gpuprof.export import triton
from gpuprof.export.triton import describe_limits, read_repository, write_configurations
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.store import COPIES
from gpuprof.placement.contract import demand, plain_device, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.runtime.free_batch import ensure_dynamic_batch
from tests.estimators.rows import database, measured_row
from tests.profiling.models import write_mlp
from tests.small_models import Dims, floats, write_model

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


def _write(path: Path, op: str = "Relu", domain: str = "", opset: int = 17) -> Path:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], domain=domain)], "g", values[:1], values[1:])
    imports = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), str(path))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "fine.onnx")
    (tmp_path / "slo.csv").write_text("model,rate_rps,slo_ms\nfine.onnx,20,50\nother.onnx,10,60\n")
    return tmp_path


@pytest.mark.parametrize(
    ("op", "domain", "opset", "message"),
    [("Frobnicate", "acme.ops", 17, "is not a registered function"), ("Relu", "", 99, "has opset 99 of ai.onnx")],
    ids=["foreign domain", "newer opset"],
)
def test_place_refuses_a_file_that_the_runtime_does_not_load(
    folder: Path, capsys: pytest.CaptureFixture[str], op: str, domain: str, opset: int, message: str
) -> None:
    _write(folder / "other.onnx", op, domain, opset)
    assert main(["place", "--gpus", "t4"]) == 3
    stderr = capsys.readouterr().err
    assert "other.onnx" in stderr and message in stderr


def test_check_names_a_file_that_the_runtime_does_not_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(folder / "other.onnx")
    assert main(["place", "--gpus", "t4"]) == 0
    _write(folder / "other.onnx", "Frobnicate", "acme.ops")
    capsys.readouterr()
    assert main(["check", "map.json", "--allow-changed", "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["violations"]
    assert fault["rule"] == "file" and "is not a registered function" in fault["message"]


def test_place_refuses_types_that_the_protocol_lacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [helper.make_tensor_value_info(name, kind, ["n", 4]) for name, kind in (("x", 19), ("y", 1))]
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)], "g", values[:1], values[1:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.save(model, folder / "other.onnx")
    assert main(["place", "--gpus", "h100-sxm"]) == 3
    assert "tensor 'x' has type float8e5m2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dims", "axis", "message"),
    [(["n", 4], 0, "its output y for one depends on the others"), ([4, 4], 1, "has no free batch")],
)
def test_check_names_a_file_whose_requests_cannot_share_a_batch(
    folder: Path, capsys: pytest.CaptureFixture[str], dims: Dims, axis: int, message: str
) -> None:
    _write(folder / "other.onnx")
    assert main(["place", "--gpus", "t4"]) == 0
    plan = (folder / "map.json").read_text().replace('"batch": 1,', '"batch": 4,')
    (folder / "map.json").write_text(plan)
    node = helper.make_node("Softmax", ["x"], ["y"], axis=axis)
    write_model(folder / "other.onnx", [node], {"x": dims}, {"y": dims})
    capsys.readouterr()
    assert main(["check", "map.json", "--allow-changed", "--json"]) == 1
    faults = {fault["where"]: fault["message"] for fault in json.loads(capsys.readouterr().out)["violations"]}
    assert message in faults["other"] and "fine" not in faults


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, version in (("small", 1), ("large", 3)):
        folder = tmp_path / "repo" / name
        (folder / str(version)).mkdir(parents=True)
        write_mlp(folder / str(version) / "model.onnx")
        text = f'name: "{name}" backend: "onnxruntime" max_batch_size: 2 optimization {{ graph {{ level: 1 }} }}'
        (folder / "config.pbtxt").write_text(text + " instance_group [ { count: 7 kind: KIND_CPU } ]")
    (tmp_path / "repo" / "text" / "1").mkdir(parents=True)
    (tmp_path / "repo" / "text" / "config.pbtxt").write_text('backend: "python"')
    (tmp_path / "slo.csv").write_text("model,rate_rps,slo_ms\nsmall,100,50\nlarge,2000,20\n")
    return tmp_path / "repo"


def _read(path: Path) -> model_config_pb2.ModelConfig:
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


def test_the_plan_becomes_configurations_that_keep_every_other_field(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (repository / "large" / "config.pbtxt").read_text()
    assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40", "--json"]) == 0
    stderr = capsys.readouterr().err
    assert "text of the repository is not planned: python executes it" in stderr
    places = list(read_map(Path("map.json")).places())  # a server cannot divide a GPU
    assert all(partition.mig is None and replica.sm_share_pct == 100.0 for *_, partition, replica in places)
    command = "tritonserver --model-repository=repo $(cat repo/node0.options)"
    assert f"2 configurations into repo: start it with {command}" in stderr
    assert (repository / "node0.options").read_text() == "--model-config-name=node0\n"
    assert (repository / "large" / "config.pbtxt").read_text() == before
    for name in ("small", "large"):
        planned = _read(repository / name / "configs" / "node0.pbtxt")
        assert (planned.name, planned.backend, planned.optimization.graph.level) == (name, "onnxruntime", 1)
        (group,) = planned.instance_group
        assert (group.kind, list(group.gpus)) == (group.KIND_GPU, [0])
        assert planned.max_batch_size >= 1
        if planned.max_batch_size > 1:
            assert list(planned.dynamic_batching.preferred_batch_size) == [planned.max_batch_size]


@pytest.mark.parametrize("turns", [(1, 1), (1, 2), (0, 0)])
def test_shares_of_a_cpu_are_cores_of_the_server_and_turns_are_not_kept(
    repository: Path, monkeypatch: pytest.MonkeyPatch, turns: tuple[int, int]
) -> None:
    monkeypatch.setattr(triton, "own_cores", lambda: (0, 1))
    cpu = replace(plain_device("cpu-2c"), kind="cpu")
    given = problem([demand("small"), demand("large")], [(cpu, None)])
    replicas = (
        PlacedReplica("small", 2, 1, Share(50.0), 9.0, turns=turns[0]),
        PlacedReplica("large", 1, 1, Share(50.0), 9.0, turns=turns[1]),
    )
    deployment = to_map(given, Placement("by hand", (PlacedGpu("cpu-2c", (PlacedPartition(replicas),)),)))
    files = write_configurations(deployment, read_repository(repository))
    small, large = (
        text_format.Parse(files[f"{name}/configs/node0.pbtxt"], model_config_pb2.ModelConfig()).instance_group[0]
        for name in ("small", "large")
    )
    has_one_worker = turns == (1, 1)
    cores = ["0-0"] if has_one_worker else ["0-0", "1-1"]
    assert files["node0.options"].split() == [
        "--model-config-name=node0",
        *(f"--host-policy=cores-{cores},cpu-cores={cores}" for cores in cores),
    ]
    assert (small.host_policy, large.host_policy) == (f"cores-{cores[0]}", f"cores-{cores[-1]}")
    assert any("that take turns in the plan" in remark for remark in describe_limits(deployment)) is any(turns)


def _write_ensemble(repository: Path, needed: str = "middle") -> None:
    (repository / "whole" / "1").mkdir(parents=True)
    steps = (("large", needed, "output"), ("small", "input", "middle"))  # in no order, as Triton allows
    text = " ".join(
        f'step {{ model_name: "{model}" input_map {{ key: "x" value: "{source}" }} '
        f'output_map {{ key: "y" value: "{result}" }} }}'
        for model, source, result in steps
    )
    (repository / "whole" / "config.pbtxt").write_text(
        'platform: "ensemble" input { name: "input" data_type: TYPE_FP32 dims: 4 } '
        f'output {{ name: "output" data_type: TYPE_FP32 dims: 4 }} ensemble_scheduling {{ {text} }}'
    )


def test_an_ensemble_is_planned_as_a_chain_in_the_order_of_its_tensors(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_ensemble(repository)
    (repository.parent / "slo.csv").write_text("model,rate_rps,slo_ms\nwhole,100,50\nsmall,10,20\n")
    assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 0
    chain = read_map(repository.parent / "map.json").chains["whole"]
    assert (chain.steps, chain.slo_ms) == (("whole.small", "large"), 50.0)
    assert (repository / "large" / "configs" / "node0.pbtxt").is_file()
    assert not (repository / "whole" / "configs").exists()
    assert _read(repository / "small" / "configs" / "node0.pbtxt").instance_group[0].count == 2  # both services
    capsys.readouterr()


def test_an_ensemble_takes_no_larger_batches_than_its_models(repository: Path) -> None:
    _write_ensemble(repository)
    config = repository / "whole" / "config.pbtxt"
    config.write_text(f"max_batch_size: 1024 {config.read_text()}")
    (repository.parent / "slo.csv").write_text("model,rate_rps,slo_ms\nwhole,100,50\n")
    assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 0
    steps = [_read(repository / name / "configs" / "node0.pbtxt").max_batch_size for name in ("small", "large")]
    planned = _read(repository / "whole" / "configs" / "node0.pbtxt")
    assert planned.max_batch_size == min(steps) < 1024  # Triton refuses to load an ensemble with a larger one
    assert len(planned.ensemble_scheduling.step) == 2


def test_an_ensemble_with_a_tensor_that_no_step_makes_is_refused(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_ensemble(repository, "absent")
    assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 3
    assert "whole has no step that makes 'absent' for large" in capsys.readouterr().err


def test_what_cannot_be_planned_is_refused_by_name(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in (
        ("text,1,50", "text cannot be planned: python executes it"),
        ("smal,1,50", "small"),
        ("small>text,1,50", "text cannot be planned: python executes it"),
    ):
        (repository.parent / "slo.csv").write_text(f"model,rate_rps,slo_ms\n{content}\n")
        assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 3
        assert message in capsys.readouterr().err
    (repository / "small" / "config.pbtxt").write_text("max_batch_size: {")
    assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 3
    assert "is not a model configuration of Triton" in capsys.readouterr().err
    assert main(["place", "--triton-repository", "nowhere", "--gpus", "a100-40"]) == 3
    assert "there is no Triton repository nowhere" in capsys.readouterr().err
