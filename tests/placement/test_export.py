from __future__ import annotations

import json

import pytest

from gpuprof.errors import InputError
from gpuprof.placement.contract import demand, plain_device, problem, sliced_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.export import export
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import ModelFile
from gpuprof.share import Share

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


def test_mig_parted_gets_a_configuration_for_each_node() -> None:
    assert export(MAP, "mig-parted") == {
        "mig-parted.yaml": """version: v1
mig-configs:
  node0:
    - devices: [0]
      mig-enabled: true
      mig-devices:
        "3g.40gb": 2
  node1:
    - devices: [0]
      mig-enabled: false
      mig-devices: {}
"""
    }


def test_triton_gets_a_repository_and_an_environment_for_each_replica() -> None:
    files = export(MAP, "triton")
    assert sorted(name for name in files if name.endswith(".pbtxt")) == [
        "node0-gpu0-net-a-2/net-a/config.pbtxt",
        "node0-gpu0-net-a/net-a/config.pbtxt",
        "node1-gpu0-b-2/b/config.pbtxt",
        "node1-gpu0-b/b/config.pbtxt",
    ]
    config = files["node0-gpu0-net-a/net-a/config.pbtxt"]
    assert "max_batch_size: 4" in config
    assert "count: 2 kind: KIND_GPU" in config
    assert files["node1-gpu0-b/server.env"] == (
        "CUDA_VISIBLE_DEVICES=0\nCUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps-node1-gpu0\n"
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30\n"
    )
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4M" in files["node0-gpu0-net-a/server.env"]


def test_kubernetes_gets_mig_resources_and_mps_shares() -> None:
    manifest = json.loads(export(MAP, "k8s", "registry/image:1")["gpuprof.yaml"])
    containers = [item["spec"]["template"]["spec"]["containers"][0] for item in manifest["items"]]
    assert [container["resources"]["limits"] for container in containers] == [
        {"nvidia.com/mig-3g.40gb": 1},
        {"nvidia.com/mig-3g.40gb": 1},
        {"nvidia.com/gpu": 1},
        {"nvidia.com/gpu": 1},
    ]
    assert {"name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "value": "30"} in containers[2]["env"]
    assert len({item["metadata"]["name"] for item in manifest["items"]}) == 4


def test_json_is_the_map() -> None:
    assert export(MAP, "json") == {"map.json": MAP.to_json()}


def test_a_models_file_is_named() -> None:
    given = problem([demand("b", 5.0)])
    filed = type(given)(
        given.demands, given.fleet, given.estimator, given.queueing, files={"b": ModelFile("/m/b.onnx")}
    )
    placed = to_map(filed, Placement("by hand", (PlacedGpu("plain", (PlacedPartition((B,)),)),)))
    assert export(placed, "triton")["node0-gpu0-b/b/1/model.path"] == "/m/b.onnx\n"


@pytest.mark.parametrize(
    ("target", "message"), [("yaml", "unknown export 'yaml'"), ("k8s", "a Kubernetes manifest needs a container image")]
)
def test_what_cannot_be_written_is_said(target: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        export(MAP, target)
