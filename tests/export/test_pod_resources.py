"""What pods ask their machines for: it follows the map, and says what was assumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_file import parse_map
from gpuprof.export.kubernetes import PodResources, ask_machine
from gpuprof.export.targets import export
from tests.export.test_export import MAP, awkward, merged_map

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
    from tests.export.test_manifests import model_with_external_data

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
    specs = [
        manifest["spec"]
        for manifest in yaml.safe_load_all(manifests)
        if manifest["kind"] in {"Deployment", "InferenceService"}
    ]
    pods = [spec["predictor"] if "predictor" in spec else spec["template"]["spec"] for spec in specs]
    return [container for pod in pods for container in pod["containers"]]


def _quantity(text: str | int) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(m|Mi)?", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * {None: 1.0, "m": 1e-3, "Mi": 2.0**20}[unit]
