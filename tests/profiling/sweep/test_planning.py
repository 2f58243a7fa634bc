from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.profiling.sweep.planning import (
    NamedModel,
    free_batch_model,
    igniter_cells,
    parse_models,
    parse_neighbour,
    parse_shares,
    plan_cells,
)
from tests.profiling.models import write_mlp
from tests.small_models import write_model

CPU = Device("cpu-test", "cpu", 6, 1000.0, {}, 1, 1.0, 1)


@pytest.mark.parametrize("batch", ["0", "65537", "99999999"])
def test_a_neighbours_batch_is_refused_with_the_rule(batch: str) -> None:
    with pytest.raises(InputError, match="a batch size must be a whole number from 1 to 65536"):
        parse_neighbour(f"net@{batch}", CPU)


def test_a_cpus_shares_are_powers_of_two_of_its_cores_and_all() -> None:
    assert [round(share.sm_pct * 6 / 100, 3) for share in parse_shares(None, CPU)] == [1, 2, 4, 6]
    assert parse_shares("3cores,10", CPU) == (Share(10.0), Share(50.0))


def test_two_files_of_one_name_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    files = [str(write_mlp(tmp_path / "a.onnx")), str(write_mlp(tmp_path / "d" / "a.onnx"))]
    with pytest.raises(InputError, match="both called a"):
        parse_models(files)
    with pytest.raises(InputError, match="there is no model file nope"):
        parse_models(["nope.onnx"])
    with pytest.raises(InputError, match="gives the model no name"):
        parse_models([f"={files[0]}"])


def test_cells_are_the_product_and_each_appears_once(tmp_path: Path) -> None:
    path = write_mlp(tmp_path / "a.onnx")
    models = parse_models([str(path), f"other={path}"])
    assert [model.name for model in models] == ["a", "other"]
    cells = plan_cells(models, (1, 2), (Share(50.0), Share(100.0)), (1, 2))
    assert len(cells) == len({str(cell) for cell in cells}) == 16


def test_what_runs_beside_shares_what_is_left_and_is_measured_alone_too(tmp_path: Path) -> None:
    a, b = write_mlp(tmp_path / "a.onnx"), write_mlp(tmp_path / "b.onnx")
    neighbours = [parse_neighbour(f"{b}:4:30%", CPU), parse_neighbour(str(b), CPU)]
    assert parse_neighbour(f"{b}@4:30%", CPU) == neighbours[0]  # as estimate writes it
    cells = plan_cells(parse_models([str(a)]), (1,), (Share(50.0),), neighbours=neighbours)
    assert [str(cell) for cell in cells] == ["a:1:50%", "b:4:30%", "b:1:20%", "a:1:50% beside b:4:30% + b:1:20%"]
    with pytest.raises(InputError, match="leave no room"):
        plan_cells(parse_models([str(a)]), (1,), (Share(100.0),), neighbours=neighbours)


def test_a_model_whose_batch_cannot_be_freed_may_be_measured_at_its_own(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["x", "first"], ["image"]),
        helper.make_node("Conv", ["image", "w"], ["y"], name="conv"),
    ]
    weights = {"first": np.array([0]), "w": np.ones((2, 3, 1, 1), np.float32)}
    path = write_model(tmp_path / "m.onnx", nodes, {"x": [3, 8, 8]}, {"y": [1, 2, 8, 8]}, weights)
    (model,) = parse_models([str(path)])
    assert free_batch_model(model, (3,), tmp_path / "copies") == model
    with pytest.raises(InputError, match=r"conv \(Conv\) stands in the way.*at the one that it has: --batch 3"):
        free_batch_model(model, (1,), tmp_path / "copies")


def test_a_fixed_batch_is_freed_only_where_another_is_asked(tmp_path: Path) -> None:
    (model,) = parse_models([str(write_mlp(tmp_path / "a.onnx", batch=1))])
    assert free_batch_model(model, (1,), tmp_path / "copies") == model
    copy = free_batch_model(model, (1, 4), tmp_path / "copies")
    assert copy.name == "a"
    assert copy.path.is_relative_to(tmp_path / "copies")
    assert copy.job(4, Share()).graph.inputs[0].shape == (4, 64)


def test_a_picture_without_a_batch_is_measured_at_batch_one_alone(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": [3, 64, 64]}, {"y": [3, 64, 64]})
    (model,) = parse_models([str(path)])
    assert free_batch_model(model, (1,), tmp_path / "copies") == model
    with pytest.raises(InputError, match=r"no input has a batch dimension.*measure it at batch 1: --batch 1"):
        free_batch_model(model, (1, 2), tmp_path / "copies")


def test_eleven_configurations_are_measured_alone_and_five_copies_fit(tmp_path: Path) -> None:
    cells = igniter_cells(NamedModel("mlp", write_mlp(tmp_path / "mlp.onnx")))
    alone = [cell for cell in cells if not cell.beside]
    assert len({(cell.job.graph.batch, cell.job.share) for cell in alone}) == len(alone) == 11
    copies = [cell for cell in cells if cell.beside]
    assert [len(cell.beside) for cell in copies] == [1, 2, 3, 4]
    for cell in copies:
        jobs = (cell.job, *cell.beside)
        assert len({job.workload for job in jobs}) == 1
        assert sum(job.share.sm_pct for job in jobs) <= 100.0
        assert cell.job.workload in [neighbour.job.workload for neighbour in alone]
