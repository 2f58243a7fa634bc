import json
from dataclasses import replace
from hashlib import sha256
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
from gpuprof.export.triton import read_repository, write_configurations
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.store import COPIES
from gpuprof.placement.contract import demand, plain_device, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.runtime.free_batch import ensure_dynamic_batch
from tests.command_line import CommandLine
from tests.estimators.rows import database, measured_row
from tests.profiling.models import write_mlp
from tests.small_models import Dims, floats, write_model

SOUND = "model,rate_rps,slo_ms\nnet,20,100\n"
PLACE_REPOSITORY = "place --triton-repository repo --gpus a100-40"
NETS = {"net": (4.0, 2.0), "other": (10.0, 5.0)}


@pytest.fixture
def here(here: Path) -> Path:
    rows = [
        measured_row(
            model, batch, (start + batch * each) * 100.0 / share, device="v100", share=share, path=f"{model}.onnx",
            sha256="0" * 64, repeats=100, std_ms=0.1, memory=2**30,
        )
        for model, (start, each) in NETS.items()
        for batch in (1, 4)
        for share in (50.0, 100.0)
    ]  # fmt: skip
    database(here / "gpuprof-db", rows)
    (here / "slo.csv").write_text(SOUND)
    return here


def test_bare_it_plans_for_the_profiled_device_and_writes_a_sound_map(here: Path, cli: CommandLine) -> None:
    output = cli("place").out
    assert "1 × v100 (" in output and "/h), proven minimum. 20 of 20 requests/s within SLO. Unused: " in output
    placed = read_map(here / "map.json")
    assert placed.models["net"].path == "net.onnx"
    assert placed.created is None
    assert cli("check").out == "map.json is sound: 1 replica on 1 device\n"


def test_the_same_input_gives_the_same_bytes(here: Path) -> None:
    maps = []
    for name in ("one.json", "two.json"):
        assert main(["place", "-o", name]) == 0
        maps.append((here / name).read_bytes())
    assert maps[0] == maps[1]


def test_a_demand_that_cannot_be_met_is_named_and_nothing_is_written(here: Path, cli: CommandLine) -> None:
    (here / "slo.csv").write_text(SOUND + "other,5,3\n")
    stderr = cli("place", code=1).err
    assert "other: 5 requests/s cannot be served" in stderr
    assert "the least SLO that works is" in stderr
    assert not (here / "map.json").exists()


def test_with_best_effort_the_rest_is_placed(here: Path, cli: CommandLine) -> None:
    (here / "slo.csv").write_text(SOUND + "other,5,3\n")
    cli("place --best-effort", code=1)
    placed = read_map(here / "map.json")
    assert [shortfall.model for shortfall in placed.unplaced] == ["other"]
    assert [replica.model for *_, replica in placed.places()] == ["net"]
    cli("check")
    assert "other" in cli("check --against slo.csv", code=1).out


def test_programs_get_json(here: Path, cli: CommandLine) -> None:
    printed = cli.json("place --gpus v100:2")
    assert printed["predicted"]["gpus"] == 1
    assert printed["replicas"][0]["model"] == "net"
    checked = cli.json("check")
    assert (checked["map"], checked["sound"], checked["violations"]) == ("map.json", True, [])
    assert checked["basis"] == printed["basis"] and [source["kind"] for source in printed["basis"]["sources"]] == [
        "measured"
    ]
    assert cli.json("simulate --duration 2")["basis"] == printed["basis"]
    (row,) = cli.json("compare --policies ffd --gpus v100:2")
    assert row["sources"] == "1 replica (100% of the requests) measured" and row["gpus_at_upper_ends"] is None


def test_policies_are_compared_in_a_table(here: Path, cli: CommandLine) -> None:
    header, *rows = cli("compare --policies ffd,optimal,parvagpu --csv").out.splitlines()
    assert header.startswith("policy,gpus,cost_per_hour,goodput_rps")
    assert [row.split(",")[0] for row in rows] == ["ffd", "optimal", "parvagpu"]
    assert "needs a device with MIG" in rows[2]


def test_a_model_of_the_map_is_explained(here: Path, cli: CommandLine) -> None:
    cli("place")
    output = cli("explain map.json net").out
    assert "net: 20 requests/s, 99% of them within 100 ms" in output
    assert "10% less SLO" in output
    lines = cli("explain map.json net --csv").out.splitlines()
    assert lines[0].startswith("device,share,batch,processes,capacity_rps") and len(lines) > 1
    cli("explain map.json net --csv --json", code=3)
    assert "unknown model of the map 'nett' (did you mean net?)" in cli("explain map.json nett", code=3).err


def test_what_neighbours_add_to_a_batch_is_told_with_what_it_stands_on(here: Path, cli: CommandLine) -> None:
    (here / "slo.csv").write_text(f"{SOUND}other,5,500\n")
    cli("place --gpus v100:1")
    (effect,) = cli.json("explain map.json net")["neighbours"]
    # nothing was measured beside anything: the time is that of the replica alone, up to a third more is possible
    assert effect["neighbour"].startswith("other ") and effect["basis"] == "no measurement"
    assert effect["added_ms"] == 0.0 and effect["interval_ms"][1] > 1.3 * effect["alone_ms"]
    assert "What each neighbour adds to the time of a batch:" in cli("explain map.json net").out


def test_place_names_the_file_that_it_wrote_or_replaced(here: Path, cli: CommandLine) -> None:
    captured = cli("place")
    assert "gpuprof: wrote map.json" in captured.err
    assert "Sure of its times: all measured, planned at the means." in " ".join(captured.out.split())
    captured = cli("place --confidence 0.9")
    assert "gpuprof: replaced map.json" in captured.err
    assert "planned at the upper ends of 90% intervals." in " ".join(captured.out.split())


def test_explain_and_report_find_the_map(here: Path, cli: CommandLine) -> None:
    cli("place")
    named = cli("explain net --csv").out
    assert cli("explain --csv").out == cli("explain map.json net --csv").out == named
    cli("report")
    assert (here / "report.html").is_file()


def test_a_map_is_exported(here: Path, cli: CommandLine) -> None:
    cli("place")
    assert cli("export --to mig-parted").out.startswith("version: v1\nmig-configs:\n")
    assert "1 file for mig-parted written to layout" in cli("export --to mig-parted -o layout").err
    cli("export --to triton", code=3)
    cli("export --to triton -o repository")
    assert (here / "repository" / "node0-gpu0-net" / "net" / "config.pbtxt").is_file()
    cli("export")  # a map without MIG instances
    assert (here / "export-triton" / "node0-gpu0-net" / "net" / "config.pbtxt").is_file()


def test_a_map_that_no_machine_could_set_up_is_not_exported(here: Path, cli: CommandLine) -> None:
    cli("place")
    text = json.loads((here / "map.json").read_text())
    (gpu,) = text["nodes"][0]["gpus"]
    gpu["device"] = "a100-80"
    gpu["partitions"] = [
        dict(gpu["partitions"][0], mig={"profile": profile, "start": start})
        for profile, start in (("3g.40gb", 0), ("2g.20gb", 2))
    ]
    (here / "map.json").write_text(json.dumps(text))
    message = cli("export --to mig-parted", code=3).err
    assert "map.json cannot be set up: geometry: node0 gpu 0: 3g.40gb and 2g.20gb overlap" in message


def test_a_file_that_fixes_its_batch_is_placed_as_the_copy_that_was_profiled(here: Path, cli: CommandLine) -> None:
    weight = floats(8, 4)
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    write_model(here / "fixed.onnx", [product], {"x": [4, 8]}, {"y": [4, 4]}, {"w": weight})
    (here / "slo.csv").write_text("model,rate_rps,slo_ms\nfixed.onnx,20,100\n")
    assert "takes batches of 4 only" in cli("place --gpus v100", code=3).err
    copy = ensure_dynamic_batch(here / "fixed.onnx", here / "gpuprof-db" / COPIES)
    sha256 = load_graph(copy).sha256
    rows = [
        measured_row("fixed", batch, 3.0 + batch, device="v100", path=str(copy), sha256=sha256, repeats=10, std_ms=0.1)
        for batch in (1, 4)
    ]
    database(here / "gpuprof-db", rows, run_id="r2")
    assert "measured" in cli("place --gpus v100").out
    placed = read_map(here / "map.json")
    assert (here / str(placed.models["fixed"].path)).samefile(copy)


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
    folder: Path, cli: CommandLine, op: str, domain: str, opset: int, message: str
) -> None:
    _write(folder / "other.onnx", op, domain, opset)
    stderr = cli("place --gpus t4", code=3).err
    assert "other.onnx" in stderr and message in stderr


def test_check_names_a_file_that_the_runtime_does_not_load(folder: Path, cli: CommandLine) -> None:
    _write(folder / "other.onnx")
    cli("place --gpus t4")
    _write(folder / "other.onnx", "Frobnicate", "acme.ops")
    (fault,) = cli.json("check map.json --allow-changed", code=1)["violations"]
    assert fault["rule"] == "file" and "is not a registered function" in fault["message"]


def test_place_refuses_types_that_the_protocol_lacks(folder: Path, cli: CommandLine) -> None:
    values = [helper.make_tensor_value_info(name, kind, ["n", 4]) for name, kind in (("x", 19), ("y", 1))]
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)], "g", values[:1], values[1:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.save(model, folder / "other.onnx")
    assert "tensor 'x' has type float8e5m2" in cli("place --gpus h100-sxm", code=3).err


@pytest.mark.parametrize(
    ("dims", "axis", "message"),
    [(["n", 4], 0, "its output y for one depends on the others"), ([4, 4], 1, "has no free batch")],
)
def test_check_names_a_file_whose_requests_cannot_share_a_batch(
    folder: Path, cli: CommandLine, dims: Dims, axis: int, message: str
) -> None:
    _write(folder / "other.onnx")
    cli("place --gpus t4")
    plan = (folder / "map.json").read_text().replace('"batch": 1,', '"batch": 4,')
    (folder / "map.json").write_text(plan)
    node = helper.make_node("Softmax", ["x"], ["y"], axis=axis)
    write_model(folder / "other.onnx", [node], {"x": dims}, {"y": dims})
    violations = cli.json("check map.json --allow-changed", code=1)["violations"]
    faults = {fault["where"]: fault["message"] for fault in violations}
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


def test_the_plan_becomes_configurations_that_keep_every_other_field(repository: Path, cli: CommandLine) -> None:
    before = (repository / "large" / "config.pbtxt").read_text()
    stderr = cli(PLACE_REPOSITORY, "--json").err
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
def test_shares_of_a_cpu_are_cores_of_the_server(
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


def test_models_of_a_repository_are_planned_and_simulated_to_run_at_once(
    repository: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # cells are broken in narrow terminals
    rows = []
    for model, version, ms in (("small", 1, 1.0), ("large", 3, 30.0)):
        path = Path("repo", model, str(version), "model.onnx")
        write_mlp(path, int(8 * ms))
        digest = sha256(path.read_bytes()).hexdigest()
        rows += [
            measured_row(
                model, batch, ms, device="v100", path=str(path), sha256=digest, repeats=100, std_ms=0.1, memory=2**30
            )
            for batch in (1, 2)
        ]
    database(repository.parent / "gpuprof-db", rows)
    Path("slo.csv").write_text("model,rate_rps,slo_ms\nsmall,50,200\nlarge,10,200\n")

    def predict(command: str) -> dict[str, float]:
        return {row["model"]: row["p99_ms"] for row in cli.json(command)["replicas"]}

    shared = predict("place --triton-repository repo --gpus v100:1")
    assert all(replica.time_slice_ms == 2.0 for *_, replica in read_map(Path("map.json")).places())
    cli("check map.json")
    assert "large in the same share, time-sliced" in cli("explain map.json small").out
    simulated = cli.json("simulate map.json --duration 1000s")["models"]
    assert shared == pytest.approx({row["model"]: row["p99_ms"] for row in simulated}, rel=0.35)
    assert "gpuprof serve runs those of a worker by turns" in cli("export map.json --to k8s --image x", code=3).err
    by_turns = predict("place --no-mig --no-mps --gpus v100:1")
    assert shared["small"] < 0.5 * by_turns["small"] and shared["large"] > by_turns["large"]


def test_a_model_that_is_late_in_a_simulation_of_its_time_slices_is_named(
    repository: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr("gpuprof.pipeline.place._simulate_misses", lambda deployment: ["small is late"])
    assert "small is late" in cli(PLACE_REPOSITORY).err


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


def test_an_ensemble_is_planned_as_a_chain_in_the_order_of_its_tensors(repository: Path, cli: CommandLine) -> None:
    _write_ensemble(repository)
    (repository.parent / "slo.csv").write_text("model,rate_rps,slo_ms\nwhole,100,50\nsmall,10,20\n")
    cli(PLACE_REPOSITORY)
    chain = read_map(repository.parent / "map.json").chains["whole"]
    assert (chain.steps, chain.slo_ms) == (("whole.small", "large"), 50.0)
    assert (repository / "large" / "configs" / "node0.pbtxt").is_file()
    assert not (repository / "whole" / "configs").exists()
    assert _read(repository / "small" / "configs" / "node0.pbtxt").instance_group[0].count == 2  # both services


def test_an_ensemble_takes_no_larger_batches_than_its_models(repository: Path) -> None:
    _write_ensemble(repository)
    config = repository / "whole" / "config.pbtxt"
    config.write_text(f"max_batch_size: 1024 {config.read_text()}")
    (repository.parent / "slo.csv").write_text("model,rate_rps,slo_ms\nwhole,100,50\n")
    assert main(PLACE_REPOSITORY.split()) == 0
    steps = [_read(repository / name / "configs" / "node0.pbtxt").max_batch_size for name in ("small", "large")]
    planned = _read(repository / "whole" / "configs" / "node0.pbtxt")
    assert planned.max_batch_size == min(steps) < 1024  # Triton refuses to load an ensemble with a larger one
    assert len(planned.ensemble_scheduling.step) == 2


def test_an_ensemble_with_a_tensor_that_no_step_makes_is_refused(repository: Path, cli: CommandLine) -> None:
    _write_ensemble(repository, "absent")
    assert "whole has no step that makes 'absent' for large" in cli(PLACE_REPOSITORY, code=3).err


def test_what_cannot_be_planned_is_refused_by_name(repository: Path, cli: CommandLine) -> None:
    for content, message in (
        ("text,1,50", "text cannot be planned: python executes it"),
        ("smal,1,50", "small"),
        ("small>text,1,50", "text cannot be planned: python executes it"),
    ):
        (repository.parent / "slo.csv").write_text(f"model,rate_rps,slo_ms\n{content}\n")
        assert message in cli(PLACE_REPOSITORY, code=3).err
    (repository / "small" / "config.pbtxt").write_text("max_batch_size: {")
    assert "is not a model configuration of Triton" in cli(PLACE_REPOSITORY, code=3).err
    message = "there is no Triton repository nowhere"
    assert message in cli("place --triton-repository nowhere --gpus a100-40", code=3).err
