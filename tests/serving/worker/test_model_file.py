from __future__ import annotations

import hashlib
import os
from pathlib import Path

import onnx
import pytest
from onnx import helper

from gpuprof.errors import InputError
from gpuprof.graph.file import read_onnx
from gpuprof.serving.worker.worker import check_model_file
from tests.reruns import serves_in_real_time
from tests.serving.running import map_of, replica, running
from tests.small_models import floats, write_model

pytestmark = serves_in_real_time


def adder(path: Path, value: float = 1.0) -> Path:
    node = helper.make_node("Add", ["INPUT0", "w"], ["OUTPUT0"])
    return write_model(path, [node], {"INPUT0": ["n", 1]}, {"OUTPUT0": ["n", 1]}, {"w": floats(1) + value})


def test_the_file_that_was_planned_with_is_taken_and_another_named(tmp_path: Path) -> None:
    path = adder(tmp_path / "m.onnx")
    check_model_file(path, hashlib.sha256(path.read_bytes()).hexdigest())
    check_model_file(path, "")
    with pytest.raises(InputError, match=r"m\.onnx is not the file that the map was planned with") as raised:
        check_model_file(path, "0" * 64)
    assert "--allow-changed" in raised.value.fix
    path.write_bytes(b"damaged")
    with pytest.raises(InputError, match="is not the file"):
        check_model_file(path, "0" * 64)
    with pytest.raises(InputError, match="cannot read"):
        check_model_file(tmp_path / "nowhere.onnx", "0" * 64)
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(InputError, match="named pipe"):
        check_model_file(tmp_path / "pipe.onnx", "0" * 64)


def test_data_that_stands_outside_of_the_file_counts(tmp_path: Path) -> None:
    path = adder(tmp_path / "m.onnx")
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    planned = read_onnx(path).sha256
    check_model_file(path, planned)
    data = tmp_path / "m.data"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(InputError, match="is not the file"):
        check_model_file(path, planned)


@pytest.mark.slow
def test_a_changed_file_is_refused_at_the_start_and_served_where_that_is_wanted(tmp_path: Path) -> None:
    document = map_of({"m": str(adder(tmp_path / "m.onnx"))}, [replica("m")])
    document["models"]["m"]["sha256"] = "0" * 64
    with pytest.raises(AssertionError, match=r"m\.onnx is not the file"), running(tmp_path, document):
        pass
    with running(tmp_path, document, "--allow-changed") as server:
        assert server.infer("m", [1.0])[0] == 200
