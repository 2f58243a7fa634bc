"""The runtime on a GPU, played: CPU sessions that accept or refuse options, and host memory for the device's."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from gpuprof.domain.runtime_variant import Padding
from gpuprof.errors import InputError
from gpuprof.runtime.gpu_session import GpuOptions, GpuSession, open_on_gpu
from gpuprof.runtime.providers import GPU_OPTIONS
from gpuprof.runtime.session import open_session
from tests.runtime.played_gpu import PlayedMemory, PlayedSession, play_gpu
from tests.small_models import floats, write_model

BATCH = 6


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """Options of each session opened, all of which are accepted."""
    return play_gpu(monkeypatch, lambda options: None)


def convolution(path: Path) -> Path:
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("GlobalMaxPool", ["c"], ["y"])]
    return write_model(path, nodes, {"x": ["N", 2, 5, 5]}, {"y": ["N", 3, 1, 1]}, {"w": floats(3, 2, 3, 3)})


def product(path: Path) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return write_model(path, nodes, {"x": ["N", 4]}, {"y": ["N", 3]}, {"w": floats(4, 3)})


def random_batch(rows: int = BATCH, *shape: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, *(shape or (2, 5, 5)))).astype(np.float32)}


def open_played(path: Path, feeds: Mapping[str, Any], batch: int | None = BATCH) -> GpuSession:
    return open_on_gpu(path, feeds, batch, threads=1, memory=PlayedMemory(), device="cpu")


def _bound_shapes(session: GpuSession) -> set[tuple[int, ...]]:
    return {shape for ((_, shape, _),) in session._bound}


def assert_answers(session: GpuSession, path: Path, feeds: Mapping[str, Any]) -> None:
    expected = open_session(path, threads=1).run(["y"], dict(feeds))[0]
    np.testing.assert_allclose(session.run(feeds)["y"], expected, rtol=1e-4, atol=1e-6)


def test_all_options_are_used_where_all_work(opened: list[Mapping[str, str]], tmp_path: Path) -> None:
    path = convolution(tmp_path / "m.onnx")
    session = open_played(path, random_batch())
    assert session.options.execution == "fused+channels-last+pinned+graphs" and session.remarks == ()
    assert session.options.padding is Padding.POWERS_OF_TWO
    assert opened == [{}, {"prefer_nhwc": "1", "fuse_conv_bias": "1", "enable_cuda_graph": "1"}]
    for rows in (1, 2, 3, 5, 6, 3):
        assert_answers(session, path, random_batch(rows))
    assert _bound_shapes(session) == {(rows, 2, 5, 5) for rows in (1, 2, 4, 6)}


def test_models_without_plans_by_shape_run_at_their_own_size(opened: list[Any], tmp_path: Path) -> None:
    path = product(tmp_path / "m.onnx")
    session = open_played(path, random_batch(BATCH, 4))
    assert session.options == GpuOptions(pinned=True, graphs=True)
    for rows in (5, 3, 5):
        assert_answers(session, path, random_batch(rows, 4))
    assert (5, 4) in _bound_shapes(session)


@pytest.mark.parametrize(
    ("refused", "execution"),
    [("enable_cuda_graph", "fused+channels-last+pinned+sessions"), ("prefer_nhwc", "fused+pinned+graphs")],
)
def test_a_refused_option_is_left_out_and_the_reason_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: str, execution: str
) -> None:
    def refuse(options: Mapping[str, str]) -> None:
        if refused in options:
            raise InputError(f"this build has no {refused}")

    opened = play_gpu(monkeypatch, refuse)
    path = convolution(tmp_path / "m.onnx")
    session = open_played(path, random_batch())
    assert session.options.execution == execution
    assert session.remarks and all(f"this build has no {refused}" in remark for remark in session.remarks)
    assert_answers(session, path, random_batch(3))
    if session.options.sessions:  # of batches of 1, 2, 4 and 6
        assert sum("prefer_nhwc" in options and refused not in options for options in opened) == 4


def test_a_graph_with_stale_answers_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A graph replays old outputs, as one would whose plans are gone."""

    class Stale(PlayedSession):
        def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
            if int(options.get_run_config_entry("gpu_graph_id")) < 0 or binding not in ran:
                self.session.run_with_iobinding(binding, options)
            ran.append(binding)

    ran: list[Any] = []
    play_gpu(
        monkeypatch,
        lambda options: None,
        lambda session, options: Stale(session) if "enable_cuda_graph" in options else session,
    )
    session = open_played(convolution(tmp_path / "m.onnx"), random_batch())
    assert session.options.sessions and not session.options.graphs
    assert "output y differs at batch 6" in session.remarks[0]


def test_sessions_that_prepare_each_shape_get_full_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A partial batch must take its own time, or there is no point in running it at its own size."""
    clock = [0.0]

    class Planning(PlayedSession):
        def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
            self.session.run_with_iobinding(binding, options)
            rows = binding.get_outputs()[0].shape()[0]
            clock[0] += 0.001 * rows + (0.1 if last[0] != rows else 0.0)
            last[0] = rows

    last = [0]
    play_gpu(monkeypatch, lambda options: None, lambda session, options: Planning(session))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    path = convolution(tmp_path / "m.onnx")
    session = open_played(path, random_batch())
    assert session.options.execution == "fused+channels-last+pinned" and session.options.padding is Padding.FULL
    assert all(
        "a batch of 1 after a batch of 6 takes 101 ms, after its own size 1 ms" in why for why in session.remarks
    )
    assert_answers(session, path, random_batch(2))
    assert _bound_shapes(session) == {(6, 2, 5, 5)}


def test_channels_last_is_refused_where_it_is_slower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [0.0]

    class Slower(PlayedSession):
        taken_s = 0.001

        def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
            self.session.run_with_iobinding(binding, options)
            clock[0] += self.taken_s

    def slow_down(session: Any, options: Mapping[str, str]) -> Slower:
        played = Slower(session)
        played.taken_s *= 2.0 if "prefer_nhwc" in options else 1.0
        return played

    play_gpu(monkeypatch, lambda options: None, slow_down)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    session = open_played(convolution(tmp_path / "m.onnx"), random_batch())
    assert session.options.execution == "fused+pinned+graphs"
    assert "a full batch takes 2 ms, plainly 1 ms" in session.remarks[0]


def test_without_cudas_runtime_batches_are_bound_one_by_one(opened: list[Any], tmp_path: Path) -> None:
    path = convolution(tmp_path / "m.onnx")
    session = open_on_gpu(path, random_batch(), BATCH, threads=1, device="cpu")
    assert session.options == GpuOptions(padding=Padding.FULL) and session.options.execution == "fused"
    assert "libcudart" in session.remarks[0]
    assert_answers(session, path, random_batch(4))


def test_random_answers_prove_no_option(opened: list[Any], tmp_path: Path) -> None:
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["r"]), helper.make_node("Add", ["x", "r"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, {"x": ["N", 4]}, {"y": ["N", 4]})
    session = open_played(path, random_batch(BATCH, 4))
    assert session.options == GpuOptions() and "in a second run" in session.remarks[0]


@pytest.mark.parametrize(("choice", "execution"), [("plain", "fused"), ("tensorrt", "fused+pinned+graphs")])
def test_a_user_chooses_by_an_environment_variable(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, choice: str, execution: str
) -> None:
    monkeypatch.setenv(GPU_OPTIONS, choice)
    session = open_played(product(tmp_path / "m.onnx"), random_batch(BATCH, 4))
    assert session.options.execution == execution
    assert ["libnvinfer.so.10" in remark for remark in session.remarks] == [True] * (choice == "tensorrt")


def test_a_batch_that_is_staged_meanwhile_changes_nothing_of_the_running_one(opened: list[Any], tmp_path: Path) -> None:
    path = product(tmp_path / "m.onnx")
    session = open_played(path, random_batch(BATCH, 4))
    first, second = {"x": np.full((6, 4), 1.0, np.float32)}, {"x": np.full((6, 4), 2.0, np.float32)}
    staged = [session.stage(first), session.stage(second)]
    one, two = (session.run_staged(batch, ["y"])[0].copy() for batch in staged)
    np.testing.assert_allclose(two, 2.0 * one, rtol=1e-5)


def test_a_model_without_a_batch_is_never_padded(opened: list[Any], tmp_path: Path) -> None:
    path = convolution(tmp_path / "m.onnx")
    session = open_played(path, random_batch(), batch=None)
    assert session.options.graphs and session.options.padding is Padding.NONE
    assert_answers(session, path, random_batch(2))
