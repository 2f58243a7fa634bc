from pathlib import Path

import pytest

from gpuprof.domain.deployment import parse_map
from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine.cgroup import own_cores
from gpuprof.serving.plan.serving_plan import MapSource, Planner
from tests.serving.running import map_of, replica


def plan(document: dict, base: Path = Path(), node: str | None = None):  # type: ignore[no-untyped-def, type-arg]
    return Planner("g", node).plan(MapSource(parse_map(document, "test"), base))


def test_each_replica_has_cores_of_its_own_and_an_order_for_each_process() -> None:
    planned = plan(map_of({"a": "null:4", "b": "null:8"}, [replica("a", processes=2), replica("b")]))
    assert [(p.model, p.plan.name, len(p.orders)) for p in planned] == [("a", "a/0", 2), ("b", "b/0", 1)]
    if len(own_cores()) % 2 == 0:
        first, second = planned[0].orders[0], planned[1].orders[0]
        assert not set(first.cores) & set(second.cores)
        assert len(first.cores) == first.threads == len(own_cores()) // 2


def test_replicas_of_one_model_are_numbered() -> None:
    planned = plan(map_of({"a": "null:4"}, [replica("a"), replica("a")]))
    assert [p.plan.name for p in planned] == ["a/0", "a/1"]


def test_latencies_that_the_map_lacks_are_guessed_from_the_full_batch() -> None:
    (planned,) = plan(map_of({"a": "null:4"}, [replica("a", batch=4, latency_ms=8.0)]))
    assert planned.plan.latency_ms == (5.0, 6.0, 7.0, 8.0)
    (planned,) = plan(map_of({"a": "null:4"}, [replica("a", batch=3, batch_latency_ms=[2.0, 3.0])]))
    assert planned.plan.latency_ms == (2.0, 3.0, 3.0)


def test_model_files_are_found_beside_the_map(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    (planned,) = plan(map_of({"m": "m.onnx"}, [replica("m")]), tmp_path)
    assert planned.orders[0].path == str(tmp_path / "m.onnx")


def test_what_cannot_be_served_is_said() -> None:
    models = {"missing": "nowhere.onnx", "huge": "null:huge", "m": "null:4"}
    planned = plan(map_of(models, [replica(name, sm_share_pct=30.0) for name in models]))
    assert [len(p.orders) for p in planned] == [0, 0, 1]
    assert "cannot read nowhere.onnx" in str(planned[0].fault) and "not a null model" in str(planned[1].fault)
    with pytest.raises(InputError, match="not among its models"):
        plan(map_of({"m": "null:4"}, [replica("x")]))
    with pytest.raises(InputError, match="at most 100 percent"):
        plan(map_of({"m": "null:4"}, [replica("m", sm_share_pct=60.0), replica("m", sm_share_pct=60.0)]))
    with pytest.raises(InputError, match="planned for models that run at once"):
        plan(map_of({"m": "null:4"}, [replica("m", turns=1, time_slice_ms=1.0)]))
    with pytest.raises(InputError, match="no replica"):
        plan(map_of({"m": "null:4"}, []))
    with pytest.raises(InputError, match="unknown node 'm'"):
        plan(map_of({"m": "null:4"}, [replica("m")]), node="m")
    twice = map_of({"m": "null:4"}, [replica("m")])
    twice["nodes"] *= 2
    with pytest.raises(InputError, match="two nodes are called"):
        plan(twice, node=twice["nodes"][0]["name"])
    gpu = map_of({"m": "null:4"}, [replica("m")])
    gpu["nodes"][0]["gpus"][0]["device"] = "a100-80"
    with pytest.raises(UnavailableError, match="a100-80"):
        plan(gpu)
    two = map_of({"m": "null:4"}, [replica("m")])
    two["nodes"].append({**two["nodes"][0], "name": "other"})
    with pytest.raises(InputError, match="--node"):
        plan(two)
    assert len(plan(two, node="other")) == 1
