"""What is written for mig-parted, Triton, Ray Serve and other tools."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from gpuprof.domain.deployment import DeploymentMap, MigInstance, parse_map
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.export import triton
from gpuprof.export.ray_serve import ROUTER, deployment_names
from gpuprof.export.targets import export
from gpuprof.placement.contract import demand, plain_device, problem, sliced_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.published.ffd import FirstFitDecreasing

A = PlacedReplica("Net/A", 4, 2, Share(100.0, "3g.40gb"), 10.0, memory_bytes=3 * 2**20 + 1)
B = PlacedReplica("b", 2, 1, Share(30.0), 5.0)
GIVEN = problem([demand("Net/A", 10.0), demand("b", 10.0)], [(sliced_device(), None), (plain_device(), None)])
MAP = to_map(
    GIVEN,
    Placement(
        "by hand",
        (
            PlacedGpu("sliced", (PlacedPartition((A,), "3g.40gb", 0), PlacedPartition((A,), "3g.40gb", 4))),
            PlacedGpu("plain", (PlacedPartition((B, B)),)),
        ),
    ),
)


def test_triton_gets_a_repository_and_an_environment_for_each_replica() -> None:
    files = export(MAP, "triton").files
    assert sorted(name for name in files if name.endswith(".pbtxt")) == [
        "node0-gpu0-net-a-2/Net_A/config.pbtxt",
        "node0-gpu0-net-a/Net_A/config.pbtxt",
        "node1-gpu0-b-2/b/config.pbtxt",
        "node1-gpu0-b/b/config.pbtxt",
    ]
    config = files["node0-gpu0-net-a/Net_A/config.pbtxt"]
    assert "max_batch_size: 4" in config
    assert "count: 2 kind: KIND_GPU" in config
    assert files["node1-gpu0-b/server.env"] == (
        "CUDA_VISIBLE_DEVICES=0\nCUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps-node1-gpu0\n"
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30\n"
    )
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4M" in files["node0-gpu0-net-a/server.env"]


def test_whoever_starts_tritons_servers_is_told_which_stands_where_and_what_is_not_kept() -> None:
    text = export(MAP, "triton").files["README.md"]
    assert "| node0-gpu0-net-a-2 | node0 | 0 | 3g.40gb at 4 | 100% | Net_A | 10 |" in text
    assert "| node1-gpu0-b | node1 | 0 | – | 30% | b | 5 |" in text
    content = json.loads(MAP.to_json())
    content["nodes"][1]["gpus"][0]["partitions"][0]["unshared"] = True
    unshared = export(parse_map(content, "map"), "triton").files["README.md"]
    assert "| node1-gpu0-b | node1 | 0 | – | none | b | 5 |" in unshared
    assert "run their batches at once and not in turns" in unshared


@pytest.mark.parametrize(("own", "first"), [((8, 9, 10, 11), 8), ((0, 1), 0)])
def test_replicas_that_take_turns_have_a_server_on_the_cores_of_their_share(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, ...], first: int
) -> None:
    monkeypatch.setattr(triton, "own_cores", lambda: own)  # others than the planned CPU's: not this one
    cpu = replace(plain_device("cpu-4c"), kind="cpu")
    worker = [PlacedReplica(name, 2, 1, Share(50.0), rate, turns=1) for name, rate in (("a", 10.0), ("b", 40.0))]
    alone = PlacedReplica("c", 2, 2, Share(25.0), 5.0)
    given = problem([demand("a", 10.0), demand("b", 40.0), demand("c", 5.0)], [(cpu, None)])
    placement = Placement("by hand", (PlacedGpu("cpu-4c", (PlacedPartition((*worker, alone)),)),))
    files = export(to_map(given, placement), "triton").files
    a, b, c = (
        text_format.Parse(files[f"{path}/config.pbtxt"], model_config_pb2.ModelConfig())
        for path in ("node0-gpu0-a/a", "node0-gpu0-a/b", "node0-gpu0-c/c")
    )
    assert files["node0-gpu0-a/server.options"].split() == [
        f"--host-policy=cores-{first}-{first + 1},cpu-cores={first}-{first + 1}"
    ]
    assert files["node0-gpu0-c/server.options"].split() == [
        f"--host-policy=cores-{first + 2}-{first + 2},cpu-cores={first + 2}-{first + 2}"
    ]
    (group_a,), (group_b,), (group_c,) = a.instance_group, b.instance_group, c.instance_group
    assert [group.host_policy for group in (group_a, group_b)] == [f"cores-{first}-{first + 1}"] * 2
    assert (group_c.count, group_c.host_policy) == (2, f"cores-{first + 2}-{first + 2}")
    assert [m.parameters["intra_op_thread_count"].string_value for m in (a, b, c)] == ["2", "2", "1"]
    assert "| node0-gpu0-a | node0 | 0 | – | 50% of the cores | b | 40 |" in files["README.md"]


def test_models_that_share_a_whole_cpu_have_a_common_pool_of_threads() -> None:
    cpu = replace(plain_device("cpu-4c"), kind="cpu")
    given = problem([demand("a", 10.0), demand("b", 40.0)], [(cpu, None)])

    def list_options(share: float, *names: str) -> str:
        replicas = tuple(PlacedReplica(name, 2, 1, Share(share), 10.0, turns=1) for name in names)
        placement = Placement("by hand", (PlacedGpu("cpu-4c", (PlacedPartition(replicas),)),))
        return export(to_map(given, placement), "triton").files["node0-gpu0-a/server.options"]

    assert list_options(100.0, "a", "b").split()[1:] == [
        "--backend-config=onnxruntime,enable-global-threadpool=1",
        "--backend-config=onnxruntime,intra_op_thread_count=4",
        "--backend-config=onnxruntime,inter_op_thread_count=1",
    ]
    assert "threadpool" not in list_options(100.0, "a")
    assert "threadpool" not in list_options(50.0, "a", "b")


def test_json_is_the_map() -> None:
    assert export(MAP, "json").files == {"map.json": MAP.to_json()}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("yaml", "unknown export 'yaml'"),
        ("k8s", "a manifest needs a container image"),
        ("kserve", "a manifest needs a container image"),
    ],
)
def test_what_cannot_be_written_is_said(target: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        export(MAP, target)


LONG = "a-model-with-a-name-that-is-longer-than-the-sixty-three-letters-of-a-label"
AWKWARD = problem(
    [demand(name, 10.0) for name in ("b", "b-2", LONG, "plus")],
    [(sliced_device(), None), (plain_device(), None), (replace(plain_device("cpu-2c"), kind="cpu"), None)],
)


def awkward() -> DeploymentMap:
    """Return a map of names that collide, are too long, or hold letters that others do not allow."""
    small = [PlacedReplica(name, 4, 1, Share(20.0), 5.0) for name in ("b", "b", "b-2", LONG)]
    gpus = (
        PlacedGpu("sliced", (PlacedPartition((replace(A, model="plus", rate_rps=5.0),), "3g.40gb", 0),)),
        PlacedGpu("plain", (PlacedPartition(tuple(small)),)),
        PlacedGpu("cpu-2c", (PlacedPartition((PlacedReplica("b", 2, 1, Share(50.0), 1.0),)),)),
    )
    drawn = to_map(AWKWARD, Placement("by hand", gpus))
    first, second, *rest = drawn.nodes
    partition = first.gpus[0].partitions[0]
    media = partition.model_copy(update={"mig": MigInstance(profile="1g.10gb+me", start=0)})
    cut = first.model_copy(
        update={"name": "Rack_1", "gpus": (first.gpus[0].model_copy(update={"partitions": (media,)}),)}
    )
    return drawn.model_copy(update={"nodes": (cut, second.model_copy(update={"name": "rack-1"}), *rest)})


def test_mig_parted_gets_a_configuration_for_each_node_with_gpus() -> None:
    # NVIDIA/mig-parted, api/spec/v1: version, mig-configs → list of devices, mig-enabled, mig-devices (profile: count)
    plain, odd = (yaml.safe_load(export(drawn, "mig-parted").files["mig-parted.yaml"]) for drawn in (MAP, awkward()))
    unsliced = [{"devices": [0], "mig-enabled": False, "mig-devices": {}}]
    sliced = [{"devices": [0], "mig-enabled": True, "mig-devices": {"3g.40gb": 2}}]
    assert plain == {"version": "v1", "mig-configs": {"node0": sliced, "node1": unsliced}}
    sliced = [{"devices": [0], "mig-enabled": True, "mig-devices": {"1g.10gb+me": 1}}]
    assert odd["mig-configs"] == {"rack-1": sliced, "rack-1-2": unsliced}


@pytest.mark.parametrize(
    ("tool", "message"),
    [("mig-parted", "no GPU that could be cut into MIG instances"), ("mps", "no GPU that MPS could share")],
)
def test_a_map_without_gpus_is_refused(tool: str, message: str) -> None:
    drawn = awkward()
    with pytest.raises(InputError, match=f"the map has {message}"):
        export(drawn.model_copy(update={"nodes": drawn.nodes[2:]}), tool)


def test_tritons_own_parser_reads_the_configurations() -> None:
    files = export(awkward(), "triton").files
    configs = {name: text for name, text in files.items() if name.endswith("config.pbtxt")}
    assert len(configs) == 6
    for name, text in configs.items():
        parsed = text_format.Parse(text, model_config_pb2.ModelConfig())
        assert parsed.name == Path(name).parent.name  # Triton refuses a model whose directory is called otherwise
        assert parsed.backend == "onnxruntime"
        assert parsed.max_batch_size in parsed.dynamic_batching.preferred_batch_size
        assert parsed.instance_group[0].count >= 1
        kind = model_config_pb2.ModelInstanceGroup.Kind.Name(parsed.instance_group[0].kind)
        assert kind == ("KIND_CPU" if "node2" in name else "KIND_GPU")


def merged_map() -> DeploymentMap:
    """Return a map with a replica of a merged model."""
    given = problem([demand("a"), demand("b")])
    content = json.loads(to_map(given, FirstFitDecreasing().place(given)).to_json())
    partition = content["nodes"][0]["gpus"][0]["partitions"][0]
    first = partition["replicas"][0]
    partition["replicas"] = [first | {"model": "ab"}]
    members = {name: {key: member[key] for key in ("rate_rps", "slo_ms")} for name, member in content["models"].items()}
    rate_rps = sum(member["rate_rps"] for member in members.values())
    content["models"] = {"ab": content["models"]["a"] | {"path": "ab.onnx", "rate_rps": rate_rps, "members": members}}
    return parse_map(content, "map")


def test_merged_maps_are_refused_where_one_file_cannot_serve_several_models() -> None:
    merged = merged_map()
    with pytest.raises(InputError, match="cannot serve the merge ab"):
        export(merged, "triton", "image")
    assert "members" in export(merged, "json").files["map.json"]


@pytest.fixture(scope="module")
def schema() -> Any:
    """Import it when a test wants it: collecting the tests would otherwise wait for all of Ray."""
    return pytest.importorskip("ray.serve.schema", reason="Ray Serve is not installed")


def _config(deployment: DeploymentMap) -> dict[str, object]:
    config = yaml.safe_load(export(deployment, "ray-serve").files["serve_config.yaml"])
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("deployment", [MAP, awkward(), merged_map()], ids=["plain", "awkward", "merged"])
def test_ray_serve_reads_a_deployment_for_each_node(schema: Any, deployment: DeploymentMap) -> None:
    (application,) = schema.ServeDeploySchema.model_validate(_config(deployment)).applications
    names = [served.name for served in application.deployments]
    assert names == [ROUTER, *deployment_names(deployment).values()]
    assert len(set(names)) == len(names)
    module, _, function = application.import_path.partition(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_a_node_holds_the_gpus_or_cores_that_the_map_uses_on_the_machine_that_says_it_is_the_node(schema: Any) -> None:
    (application,) = schema.ServeDeploySchema.model_validate(_config(awkward())).applications
    options = [deployment.ray_actor_options for deployment in application.deployments[1:]]
    nodes = [node.name for node in awkward().nodes]
    assert [(option.num_gpus, option.num_cpus, option.resources) for option in options] == [
        (1, 0, {f"gpuprof:{nodes[0]}": 1}),
        (1, 0, {f"gpuprof:{nodes[1]}": 1}),
        (0, 2, {f"gpuprof:{nodes[2]}": 1}),
    ]


def test_the_map_lies_beside_its_models_and_names_them_from_there(tmp_path: Path) -> None:
    import gpuprof

    gpuprof.build_model("mlp", tmp_path / "b.onnx")
    content = json.loads(MAP.to_json())
    content["models"]["b"]["path"] = "b.onnx"
    bundle = export(parse_map(content, "map"), "ray-serve", base=tmp_path)
    assert bundle.models == {"models/b/1/b.onnx": tmp_path / "b.onnx"}
    written = parse_map(json.loads(bundle.files["map.json"]), "map")
    assert written.models["b"].path == "models/b/1/b.onnx"
    assert set(bundle.files) == {"serve_config.yaml", "map.json", "README.md"}


def test_mps_gets_a_namespace_for_each_process_with_its_share_and_memory() -> None:
    turns = [PlacedReplica(name, 2, 1, Share(40.0), 5.0, memory_bytes=5 * 2**20, turns=1) for name in ("a", "b")]
    given = problem([demand(name, 10.0) for name in ("a", "b")], [(plain_device(), None)])
    shared = to_map(given, Placement("by hand", (PlacedGpu("plain", (PlacedPartition(tuple(turns)),)),)))
    node = shared.nodes[0].model_copy(update={"name": "node2"})
    files = export(MAP.model_copy(update={"nodes": (*MAP.nodes, node)}), "mps").files
    tables = {name: tomllib.loads(text) for name, text in files.items() if name.endswith(".toml")}
    # NVIDIA, "MPS v3 Configuration File": schema_version and servers; of a server allowed_devices among others, of a
    # namespace pinned_memory_limit, active_thread_percentage and client_priority.
    half = {"active_thread_percentage": "50", "pinned_memory_limit": "4M"}
    assert tables["node0.toml"] == {
        "schema_version": "1.0",
        "servers": {
            f"gpu0-slot{start}": {
                "allowed_devices": f"UUID-OF-MIG-3g.40gb-AT-{start}-OF-GPU-0",
                "namespaces": {"net-a": half, "net-a-2": half},
            }
            for start in (0, 4)
        },
    }
    namespaces = {name: {"active_thread_percentage": "30"} for name in ("b", "b-2")}
    assert tables["node1.toml"]["servers"] == {"gpu0": {"allowed_devices": "UUID-OF-GPU-0", "namespaces": namespaces}}
    both = {"active_thread_percentage": "40", "pinned_memory_limit": "10M"}
    assert tables["node2.toml"]["servers"]["gpu0"]["namespaces"] == {"a": both}
    assert "| node0 | gpu0-slot4 | Net/A | PIPE/gpu0-slot4/net-a-2 |" in files["README.md"]
    assert "| node2 | gpu0 | a, b | PIPE/gpu0/a |" in files["README.md"]
