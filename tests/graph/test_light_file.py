"""What of an ONNX file is read: everything but the data of large weights."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from gpuprof.errors import InputError
from gpuprof.graph import file as onnx_file
from gpuprof.graph.content_hash import ContentHash
from gpuprof.graph.file import read_onnx
from gpuprof.graph.light_file import read_light
from tests.small_models import floats, write_model

_KEPT = 16_384


def _write(directory: Path) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])]
    return write_model(
        directory / "m.onnx",
        nodes,
        {"x": ["N", 256]},
        outputs={"y": ["N", 512]},
        weights={"w": floats(256, 512), "b": floats(512)},
    )


def test_only_data_of_large_weights_is_left_out(tmp_path: Path) -> None:
    path = _write(tmp_path)
    light = read_light(path, _KEPT)
    whole, read = ModelProto.FromString(path.read_bytes()), ModelProto.FromString(light.content)
    large = [one.name for one in whole.graph.initializer].index("w")
    assert light.passed_over == {large: 4 * 256 * 512}
    assert len(light.content) < _KEPT
    whole.graph.initializer[large].ClearField("raw_data")
    assert read == whole


def test_a_file_read_light_is_the_file_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path)
    light = read_onnx(path)
    monkeypatch.setattr(onnx_file, "_files", {})
    monkeypatch.setattr(onnx_file, "read_light", lambda *_: (_ for _ in ()).throw(ValueError("not such a message")))
    whole = read_onnx(path)
    assert (light.model, light.weights) == (whole.model, whole.weights)
    assert light.sha256 == whole.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_large_weight_with_data_missing_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = _write(tmp_path)
    model = ModelProto.FromString(path.read_bytes())
    weight = next(one for one in model.graph.initializer if one.name == "w")
    weight.raw_data = weight.raw_data[:-4]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=f"needs {4 * 256 * 512} bytes but has {4 * 256 * 512 - 4}"):
        read_onnx(path)


@pytest.mark.parametrize("left", [0.3, 0.9, 0.999])
def test_a_file_cut_off_is_called_so(tmp_path: Path, left: float) -> None:
    path = _write(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(left * len(content))])
    with pytest.raises(InputError, match="not an ONNX model"):
        read_onnx(path)


def test_of_data_that_stands_twice_the_last_counts(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.zeros(5000, np.float32), "w").SerializeToString()
    more = numpy_helper.from_array(np.zeros(6000, np.float32), "w")
    doubled = tensor + more.SerializeToString()  # messages that follow each other are one, merged
    graph = b"\x2a" + _varint(len(doubled)) + doubled
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x08\x08\x3a" + _varint(len(graph)) + graph)
    assert read_light(path, _KEPT).passed_over == {0: 24_000}


def test_a_content_of_several_files_is_hashed_as_one(tmp_path: Path) -> None:
    parts = [tmp_path / "a", tmp_path / "b"]
    parts[0].write_bytes(b"a" * 3_000_000)
    parts[1].write_bytes(b"b")
    assert ContentHash(parts).wait_for_digest() == hashlib.sha256(b"a" * 3_000_000 + b"b").hexdigest()


def test_a_hashed_content_goes_to_another_process_and_equals_what_holds_the_same(tmp_path: Path) -> None:
    for name, last in (("a", b"a"), ("b", b"a"), ("c", b"b")):
        (tmp_path / name).write_bytes(bytes(3_000_000) + last)
    large = ContentHash([tmp_path / "a"])
    assert pickle.loads(pickle.dumps(large)).sha256 == large.sha256
    assert large == ContentHash([tmp_path / "b"]) != ContentHash([tmp_path / "c"])
    assert hash(large) == hash(ContentHash([tmp_path / "b"]))


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])
