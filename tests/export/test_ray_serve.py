"""What is written for Ray Serve, by the schema with which `serve deploy` reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_file import parse_map
from gpuprof.export.ray_serve import ROUTER, deployment_names
from gpuprof.export.targets import export
from tests.export.test_export import MAP, awkward, merged_map


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
