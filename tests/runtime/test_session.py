from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from gpuprof.errors import InputError, UnavailableError
from gpuprof.runtime.session import SESSION_CONFIG, open_session, session_settings
from tests.profiling.models import write_mlp, write_strange


def test_idle_threads_do_not_spin(tmp_path: Path) -> None:
    options = open_session(write_mlp(tmp_path / "m.onnx"), threads=2).get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.intra_op_num_threads == 2
    assert set(SESSION_CONFIG) <= set(session_settings(2))


def test_files_that_are_no_model_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = write_mlp(tmp_path / "m.onnx").read_bytes()
    for name, content in {"text": b"hello", "cut": whole[:2000], "empty": b""}.items():
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            open_session(path, threads=1)
        assert name in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no such file"):
        open_session(tmp_path / "none.onnx", threads=1)


def test_an_operator_that_the_runtime_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Nonsense"):
        open_session(write_strange(tmp_path / "odd.onnx"), threads=1)


def test_what_the_runtime_says_of_a_broken_model_comes_with_a_remedy_that_fits(tmp_path: Path) -> None:
    model = onnx.load(write_mlp(tmp_path / "m.onnx"))
    model.opset_import[0].version = 99
    onnx.save(model, tmp_path / "new.onnx")
    with pytest.raises(InputError) as too_new:
        open_session(tmp_path / "new.onnx", threads=1)
    assert "has opset 99 of ai.onnx; ONNX Runtime here has opsets up to " in too_new.value.message
    assert "export it with opset " in too_new.value.fix
    twice = onnx.load(tmp_path / "m.onnx")
    for node in twice.graph.node:
        node.name = "same"
    onnx.save(twice, tmp_path / "twice.onnx")
    with pytest.raises(InputError, match="two nodes with same node name") as caught:
        open_session(tmp_path / "twice.onnx", threads=1)
    assert caught.value.fix == "correct the model, or export it again"


def test_a_provider_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="has no NoSuchProvider here"):
        open_session(write_mlp(tmp_path / "m.onnx"), threads=1, provider="NoSuchProvider")
