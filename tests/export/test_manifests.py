"""What is written for Kubernetes and KServe, by the published schemas of Kubernetes; what pods request."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import numpy as np
import onnx
import pytest
import yaml

from gpuprof.domain.deployment import DeploymentMap, parse_map
from gpuprof.errors import InputError
from gpuprof.export import kubernetes
from gpuprof.export.kubernetes import PodResources, ask_machine
from gpuprof.export.targets import export
from tests.command_line import CommandLine
from tests.export.test_export import MAP, awkward, merged_map
from tests.small_models import write_model

IMAGE = "registry/gpuprof:1"
_NODE_KINDS = {"Deployment", "InferenceService"}


def _manifests(deployment: DeploymentMap, target: str = "k8s") -> list[dict[str, Any]]:
    name = {"k8s": "gpuprof.yaml", "kserve": "kserve.yaml"}[target]
    return list(yaml.safe_load_all(export(deployment, target, IMAGE).files[name]))


def _of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


@pytest.mark.parametrize("deployment", [MAP, awkward(), merged_map()], ids=["plain", "awkward", "merged"])
def test_every_object_keeps_the_schema_of_kubernetes(deployment: DeploymentMap) -> None:
    manifests = _manifests(deployment)
    assert {entry["kind"] for entry in manifests} == {"ConfigMap", "PersistentVolumeClaim", "Deployment", "Service"}
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.30", strict=True)
    names = [(entry["kind"], entry["metadata"]["name"]) for entry in manifests]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name) for _, name in names)


def test_a_pod_a_node_asks_for_the_devices_that_the_map_has_there() -> None:
    pods = [entry["spec"]["template"]["spec"] for entry in _of_kind(_manifests(MAP), "Deployment")]
    assert [pod["containers"][0]["resources"]["limits"] for pod in pods] == [
        {"nvidia.com/mig-3g.40gb": "2"},
        {"nvidia.com/gpu": "1"},  # two replicas share it by an MPS daemon of the pod's own
    ]
    assert [pod["nodeSelector"] for pod in pods] == [{"gpuprof.node": "node0"}, {"gpuprof.node": "node1"}]
    assert all("hostIPC" not in pod and "hostPID" not in pod for pod in pods)
    odd = [
        entry["spec"]["template"]["spec"]["containers"][0] for entry in _of_kind(_manifests(awkward()), "Deployment")
    ]
    assert [container["resources"]["limits"] for container in odd] == [
        {"nvidia.com/mig-1g.10gb.me": "1"},
        {"nvidia.com/gpu": "1"},
        {"cpu": "2"},
    ]


def test_pods_serve_a_node_of_a_map_that_is_read_back_and_mount_what_their_arguments_name() -> None:
    manifests = _manifests(MAP)
    (config,) = _of_kind(manifests, "ConfigMap")
    served = parse_map(json.loads(config["data"]["map.json"]), "map")
    for deployment in _of_kind(manifests, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        arguments = container["args"]
        assert container["command"] == ["gpuprof"] and arguments[0] == "serve"
        assert arguments[arguments.index("--node") + 1] in {node.name for node in served.nodes}
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
        files = [word for word in arguments if word.startswith("/")]
        assert files and all(str(Path(file).parent) in mounted.values() for file in files)
        assert all(container[probe]["httpGet"]["port"] == "http" for probe in ("startupProbe", "livenessProbe"))


def test_the_arguments_are_options_that_serve_has(cli: CommandLine) -> None:

    arguments = _of_kind(_manifests(MAP), "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    helped = cli(*arguments, "--help").out
    assert all(word in helped for word in arguments if word.startswith("--"))


@pytest.mark.parametrize("target", ["k8s", "kserve"])
def test_a_service_leads_to_the_nodes_that_have_the_model_and_no_others(target: str) -> None:
    manifests = _manifests(MAP, target)
    specs = {entry["metadata"]["name"]: entry["spec"] for entry in manifests if entry["kind"] in _NODE_KINDS}
    # KServe gives its pods another label "app" (kserve/kserve, createRawDefaultDeployment).
    labels = {
        name: spec["predictor"]["labels"] | {"app": f"isvc.{name}-predictor"}
        if target == "kserve"
        else spec["template"]["metadata"]["labels"]
        for name, spec in specs.items()
    }
    led = {
        entry["metadata"]["name"]: [n for n, has in labels.items() if entry["spec"]["selector"].items() <= has.items()]
        for entry in _of_kind(manifests, "Service")
    }
    assert led == {"m-net-a": ["gpuprof-node0"], "m-b": ["gpuprof-node1"]}


@pytest.mark.parametrize("target", ["k8s", "kserve"])
def test_nodes_of_like_or_long_names_have_names_and_labels_of_their_own(target: str) -> None:
    deployment = odd_map()
    manifests = _manifests(deployment, target)
    servers = [entry for entry in manifests if entry["kind"] in _NODE_KINDS]
    pods = [entry["spec"].get("predictor") or entry["spec"]["template"]["spec"] for entry in servers]
    labels = [pod["nodeSelector"]["gpuprof.node"] for pod in pods]
    assert len(set(labels)) == len(labels) == len(deployment.nodes)
    # KServe's label of a pod, which has 63 letters at most.
    names = [f"isvc.{entry['metadata']['name']}-predictor" for entry in servers]
    assert all(re.fullmatch(r"[a-z]([-a-z0-9.]{0,61}[a-z0-9])", name) and "--" not in name for name in names)
    selectors = [str(entry["spec"]["selector"]) for entry in servers if "selector" in entry["spec"]]
    assert len(set(selectors)) == len(selectors)
    readme = export(deployment, target, IMAGE).files["README.md"]
    assert all(
        f"gpuprof.node={label}  # {node.name}\n" in readme for label, node in zip(labels, deployment.nodes, strict=True)
    )


def test_gpus_are_numbered_as_the_pod_sees_them() -> None:
    content = json.loads(MAP.to_json())
    content["nodes"][1]["gpus"][0]["index"] = 3
    (config,) = _of_kind(_manifests(parse_map(content, "map")), "ConfigMap")
    assert json.loads(config["data"]["map.json"])["nodes"][1]["gpus"][0]["index"] == 0


def test_models_and_their_data_lie_where_the_map_of_the_pods_looks_for_them(tmp_path: Path) -> None:
    (tmp_path / "b.onnx").write_bytes(model_with_external_data(tmp_path))
    content = json.loads(MAP.to_json())
    content["models"]["b"]["path"] = "b.onnx"
    bundle = export(parse_map(content, "map"), "k8s", IMAGE, tmp_path)
    assert bundle.models == {"models/b/1/b.onnx": tmp_path / "b.onnx", "models/b/1/b.data": tmp_path / "b.data"}
    (config,) = _of_kind(list(yaml.safe_load_all(bundle.files["gpuprof.yaml"])), "ConfigMap")
    assert json.loads(config["data"]["map.json"])["models"]["b"]["path"] == "/models/b/1/b.onnx"


def test_a_model_at_unequal_rates_on_two_nodes_is_remarked_on() -> None:
    content = json.loads(MAP.to_json())
    extra = json.loads(json.dumps(content["nodes"][1])) | {"name": "node2"}
    extra["gpus"][0]["partitions"][0]["replicas"][0]["rate_rps"] *= 3
    content["nodes"].append(extra)
    notes = export(parse_map(content, "map"), "k8s", IMAGE).notes
    assert any("the Service of b sends each node the same" in note for note in notes)
    assert not any("Service" in note for note in export(MAP, "k8s", IMAGE).notes)


@pytest.mark.parametrize("deployment", [MAP, merged_map()], ids=["plain", "merged"])
def test_kserve_gets_the_same_pods_as_the_predictors_of_services(deployment: DeploymentMap) -> None:
    services = _of_kind(_manifests(deployment, "kserve"), "InferenceService")
    plain = _of_kind(_manifests(deployment), "Deployment")
    assert len(services) == len(plain) > 0
    kserve_fields = {"minReplicas", "maxReplicas", "deploymentStrategy", "labels"}
    for service, plain_deployment in zip(services, plain, strict=True):
        assert service["apiVersion"] == "serving.kserve.io/v1beta1"
        predictor = service["spec"]["predictor"]
        pod = {key: value for key, value in predictor.items() if key not in kserve_fields}
        template = {"metadata": plain_deployment["spec"]["template"]["metadata"], "spec": pod}
        as_deployment = plain_deployment | {"spec": plain_deployment["spec"] | {"template": template}}
        kubernetes_validate.validate(as_deployment, "1.30", strict=True)  # KServe inlines the fields of a pod
        assert pod["containers"][0]["args"] == plain_deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def test_quantities_are_texts_so_that_applying_a_manifest_again_changes_nothing() -> None:
    for deployment in _of_kind(_manifests(awkward()), "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert all(isinstance(value, str) for part in container["resources"].values() for value in part.values())


def test_a_map_larger_than_kubernetes_keeps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(MAP.to_json())
    content["nodes"][0]["name"] = "節点"  # two letters, six bytes
    deployment = parse_map(content, "map")
    (config,) = _of_kind(_manifests(deployment), "ConfigMap")
    monkeypatch.setattr(kubernetes, "_LARGEST_MAP_BYTES", len(config["data"]["map.json"]))
    with pytest.raises(InputError, match="in a ConfigMap"):
        export(deployment, "k8s", IMAGE)


def model_with_external_data(folder: Path) -> bytes:
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    path = write_model(
        folder / "b.onnx", [node], {"x": ["batch", 4]}, {"y": ["batch", 4]}, {"w": np.ones((4, 4), np.float32)}
    )
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="b.data", size_threshold=0)
    return path.read_bytes()


def _deployed_pods(target: str, deployment: DeploymentMap) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return metadata and spec of each pod, after a check of all manifests by the schemas of Kubernetes."""
    manifests = list(yaml.safe_load_all(export(deployment, target, IMAGE).files["gpuprof.yaml"]))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.36", strict=True)
    templates = [entry["spec"]["template"] for entry in _of_kind(manifests, "Deployment")]
    return [(template["metadata"], template["spec"]) for template in templates]


def _list_claims(deployment: DeploymentMap) -> Iterator[list[list[dict[str, Any]]]]:
    """Yield the requests of each claim of each pod."""
    manifests = list(yaml.safe_load_all(export(deployment, "k8s-dra", IMAGE).files["gpuprof.yaml"]))
    templates = {
        entry["metadata"]["name"]: entry["spec"]["spec"] for entry in _of_kind(manifests, "ResourceClaimTemplate")
    }
    for _, pod in _deployed_pods("k8s-dra", deployment):
        claims, (container,) = pod["resourceClaims"], pod["containers"]
        assert container["resources"]["claims"] == [{"name": claim["name"]} for claim in claims]
        assert not any("nvidia" in name for name in container["resources"]["limits"])
        used = [templates.pop(claim["resourceClaimTemplateName"]) for claim in claims]
        yield [[request["exactly"] for request in claim["devices"]["requests"]] for claim in used]
    assert not templates


def test_dra_claims_the_gpus_and_mig_instances_of_each_node() -> None:
    profile = "device.attributes['gpu.nvidia.com'].profile == '3g.40gb'"
    selectors = [{"cel": {"expression": profile}}]
    assert list(_list_claims(MAP)) == [
        [[{"deviceClassName": "mig.nvidia.com", "count": 2, "selectors": selectors}]],
        [[{"deviceClassName": "gpu.nvidia.com", "count": 1}]],
    ]


def test_dra_claims_no_more_devices_at_once_than_a_claim_can_have() -> None:
    for claims in _list_claims(odd_map()):
        assert [sum(request["count"] for request in claim) for claim in claims] == [32, 2]


def test_dra_names_a_profile_as_the_driver_does() -> None:
    text = export(awkward(), "k8s-dra", IMAGE).files["gpuprof.yaml"]
    assert "profile == '1g.10gb+me'" in text.replace("''", "'")


def odd_map() -> DeploymentMap:
    """Return a map of names that YAML could misread or labels do not allow, 34 MIG instances on a node, and a chain."""
    content = json.loads(MAP.to_json().replace('"Net/A"', '"模型 \'é: {#1e3}"').replace('"b"', '"1e3"'))
    first = content["nodes"][0]
    first["gpus"] = [first["gpus"][0] | {"index": index} for index in range(17)]
    names = ("yes", "Yes", "節点", "a-node-whose-name-is-cut-behind-the-dash", "..", "x" * 300)
    content["nodes"] = [first | {"name": name} for name in names]
    content["chains"] = {"both": {"steps": list(content["models"]), "slo_ms": 100.0}}
    return parse_map(content, "map")


def shared_map(*shares: float) -> DeploymentMap:
    """Return a map with these shares on a GPU, and nothing else."""
    drawn = json.loads(MAP.to_json())
    node = drawn["nodes"][1]
    (partition,) = node["gpus"][0]["partitions"]
    replica = partition["replicas"][0]
    partition["replicas"] = [replica | {"sm_share_pct": share, "memory_limit_bytes": 3 * 2**30} for share in shares]
    return parse_map(drawn | {"nodes": [node], "unplaced": []}, "map")


def test_hami_holds_each_replica_to_its_share_and_memory() -> None:
    pods = _deployed_pods("k8s-hami", shared_map(50.0, 32.5))
    limits = [pod["containers"][0]["resources"]["limits"] for _, pod in pods]
    assert [(pod["nvidia.com/gpucores"], pod["nvidia.com/gpumem"], pod["nvidia.com/gpu"]) for pod in limits] == [
        ("50", "3072", "1"),
        ("32", "3072", "1"),
    ]
    assert all(pod["nodeSelector"] == {} for _, pod in pods)


def _refuse_by_kai(meta: dict[str, Any], pod: dict[str, Any]) -> str | None:
    """Return why KAI Scheduler's admission webhook refuses a pod, None if it does not.

    Source: the rules of ValidateGpuRequests, NVIDIA/KAI-Scheduler,
    pkg/binder/plugins/gpusharing/gpu-request/gpu_request_validator.go (Apache-2.0).
    """
    fraction, whole = (
        meta["annotations"].get("gpu-fraction"),
        "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"],
    )
    if fraction is not None and not 0.0 < float(fraction) < 1.0:
        return "gpu-fraction must be a positive number smaller than 1.0"
    return "both a fraction and whole GPUs" if fraction is not None and whole else None


@pytest.mark.parametrize("shares", [(100.0,), (99.5,), (1.0, 99.0), (33.3, 33.3, 33.3)])
def test_kai_admits_every_pod_whatever_its_share(shares: tuple[float, ...]) -> None:
    pods = _deployed_pods("k8s-kai", shared_map(*shares))
    assert [_refuse_by_kai(meta, pod) for meta, pod in pods] == [None] * len(shares)
    wholes = [pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for _, pod in pods]
    assert wholes == ["1" if share == 100.0 else None for share in shares]


def test_kai_gets_a_fraction_of_a_gpu_and_each_pod_serves_its_replica_alone() -> None:
    deployment = shared_map(50.0, 40.0)
    pods = _deployed_pods("k8s-kai", deployment)
    assert [meta["annotations"]["gpu-fraction"] for meta, _ in pods] == ["0.5", "0.4"]
    assert all(meta["labels"]["kai.scheduler/queue"] == "default-queue" for meta, _ in pods)
    assert all(pod["schedulerName"] == "kai-scheduler" for _, pod in pods)
    assert not any("nvidia" in str(pod["containers"][0]["resources"]) for _, pod in pods)
    bundle = export(deployment, "k8s-kai", IMAGE)
    (config,) = _of_kind(list(yaml.safe_load_all(bundle.files["gpuprof.yaml"])), "ConfigMap")
    served = parse_map(json.loads(config["data"]["map.json"]), "map")
    assert [len(list(node.gpus[0].partitions[0].replicas)) for node in served.nodes] == [1, 1]
    assert all(node.gpus[0].partitions[0].unshared for node in served.nodes)
    assert any("are not held to shares" in note for note in bundle.notes)


def test_a_scheduler_of_fractions_refuses_shares_of_a_mig_instance_workers_and_cpus() -> None:
    drawn = json.loads(MAP.to_json())
    partition = drawn["nodes"][0]["gpus"][0]["partitions"][0]
    partition["replicas"] = [replica | {"sm_share_pct": 40.0} for replica in partition["replicas"] * 2][:2]
    with pytest.raises(InputError, match="divides whole GPUs only"):
        export(parse_map(drawn, "map"), "k8s-hami", IMAGE)
    with pytest.raises(InputError, match="a CPU has no fractions"):
        export(awkward(), "k8s-kai", IMAGE)
    shared = json.loads(shared_map(40.0, 40.0).to_json())
    for replica in shared["nodes"][0]["gpus"][0]["partitions"][0]["replicas"]:
        replica["turns"] = 1
    with pytest.raises(InputError, match="shares a worker"):
        export(parse_map(shared, "map"), "k8s-kai", IMAGE)
    assert export(parse_map(shared, "map"), "k8s", IMAGE).files  # a pod that serves the whole node


_GIB = 2**30


def _replace_predictions(node: int, **fields: object) -> DeploymentMap:
    """Return the map with other fields of all predictions of a node; ``processes`` and limits are the replicas' own."""
    content = json.loads(MAP.to_json())
    for partition in content["nodes"][node]["gpus"][0]["partitions"]:
        for replica in partition["replicas"]:
            for name, value in fields.items():
                (replica if name in replica else replica["predicted"])[name] = value
    return parse_map(content, "map")


def _ask(deployment: DeploymentMap, node: int, **file_bytes: int) -> PodResources:
    return ask_machine(deployment.nodes[node], file_bytes)


def test_each_process_adds_the_part_of_a_core_for_which_the_map_has_it_busy() -> None:
    busy = _ask(_replace_predictions(1, utilization=0.35, processes=3), 1)
    assert busy.cores == pytest.approx(1 + 2 * 3 * 0.35)
    assert busy.cpu == "3100m"  # never less than needed
    assert _ask(_replace_predictions(1, utilization=None), 1).cores == pytest.approx(
        1 + 2
    )  # as busy as can be where nobody knows
    assert _ask(_replace_predictions(1, utilization=7.0), 1).cores == pytest.approx(1 + 2)


def test_workers_of_a_gpu_need_the_hosts_memory_each_and_room_for_what_they_load() -> None:
    single, three = (_ask(_replace_predictions(1, processes=count), 1, b=_GIB) for count in (1, 3))
    assert three.memory_bytes - single.memory_bytes == 2 * (3 - 1) * (2 * _GIB + _GIB)


def test_a_cpu_gives_the_cores_of_its_name_and_the_memory_that_was_measured() -> None:
    drawn = json.loads(awkward().to_json())
    (replica,) = drawn["nodes"][2]["gpus"][0]["partitions"][0]["replicas"]
    replica["predicted"]["memory_bytes"] = 5 * _GIB
    resources = ask_machine(parse_map(drawn, "map").nodes[2], {"b": 77 * _GIB})
    assert resources.cpu == "2" and resources.requirements({})["limits"] == {"cpu": "2"}
    assert "5 GiB for models" in resources.source and resources.memory_bytes >= 5 * _GIB


@pytest.mark.parametrize("deployment", [MAP, awkward(), merged_map()], ids=["plain", "awkward", "merged"])
@pytest.mark.parametrize("target", ["k8s", "kserve"])
def test_every_pod_requests_processor_and_memory_within_its_limits(target: str, deployment: DeploymentMap) -> None:
    bundle = export(deployment, target, "registry/gpuprof:1")
    containers = _containers(bundle.files[{"k8s": "gpuprof.yaml", "kserve": "kserve.yaml"}[target]])
    assert containers
    for container in containers:
        requests, limits = (container["resources"][part] for part in ("requests", "limits"))
        assert _quantity(requests["cpu"]) > 0 and _quantity(requests["memory"]) > _GIB
        assert all(_quantity(requests[name]) <= _quantity(limits[name]) for name in requests.keys() & limits.keys())
        # KServe sets 1 core and 2 GiB where a container has no limits of its own.
        assert target == "k8s" or {"cpu", "memory"} <= limits.keys()
    assert bundle.files["README.md"].count("assumed") >= len(containers)
    assert any("assumptions" in note for note in bundle.notes)


def test_the_size_of_a_models_files_counts_with_its_external_data(tmp_path: Path) -> None:
    (tmp_path / "b.onnx").write_bytes(model_with_external_data(tmp_path))
    (tmp_path / "b.data").write_bytes(bytes(3 * 2**20))
    content = json.loads(MAP.to_json())
    content["models"]["b"]["path"] = "b.onnx"
    here = _memory(export(parse_map(content, "map"), "k8s", "i:1", tmp_path).files["gpuprof.yaml"])
    away = _memory(export(parse_map(content, "map"), "k8s", "i:1", tmp_path / "elsewhere").files["gpuprof.yaml"])
    assert here[0] == away[0]
    assert 6 * 2**20 <= here[1] - away[1] <= 8 * 2**20  # two replicas of a process each


def _memory(manifests: str) -> list[float]:
    return [_quantity(container["resources"]["requests"]["memory"]) for container in _containers(manifests)]


def _containers(manifests: str) -> list[dict[str, Any]]:
    specs = [manifest["spec"] for manifest in yaml.safe_load_all(manifests) if manifest["kind"] in _NODE_KINDS]
    pods = [spec["predictor"] if "predictor" in spec else spec["template"]["spec"] for spec in specs]
    return [container for pod in pods for container in pod["containers"]]


def _quantity(text: str | int) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(m|Mi)?", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * {None: 1.0, "m": 1e-3, "Mi": 2.0**20}[unit]
