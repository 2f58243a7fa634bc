"""Workers of several models: one process serves them, and another after it, whatever becomes of one of them."""

import os
import signal
from pathlib import Path

from tests.reruns import serves_in_real_time
from tests.serving.running import eventually, map_of, replica, running
from tests.serving.test_apply import apply

pytestmark = serves_in_real_time

TURNS = {"turns": 1, "latency_ms": 0.2}


def test_models_of_a_worker_are_served_by_one_process_and_by_its_successor(tmp_path: Path) -> None:
    replicas = [replica("a", **TURNS), replica("b", **TURNS), replica("c")]
    with running(tmp_path, map_of(dict.fromkeys("abc", "null:4"), replicas)) as server:
        assert "serving 3 models with 2 workers" in server.line
        for _ in range(20):
            for model in "abc":
                assert server.infer(model, [5.0])[0] == 200
        processes = server.workers()
        assert len(processes) == 2
        assert len({tuple(process.cpu_affinity()) for process in processes}) == 2
        shared = next(process for process in processes if len(_numbers(process.cmdline())) == 2)
        os.kill(shared.pid, signal.SIGKILL)
        assert eventually(lambda: all(server.infer(model, [5.0])[0] == 200 for model in "abc"))
        assert len(server.workers()) == 2 and shared.pid not in {process.pid for process in server.workers()}


def _numbers(command: list[str]) -> list[str]:
    return [word for word in command if word.startswith("worker:")]


def test_a_model_that_cannot_be_loaded_leaves_the_others_of_its_worker(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    files = {"a": "null:4", "b": "broken.onnx", "c": "null:4"}
    with running(tmp_path, map_of(files, [replica(name, **TURNS) for name in files])) as server:
        assert [server.infer(model, [5.0])[0] for model in "ac"] == [200, 200]
        assert server.infer("b", [5.0])[0] != 200
        assert len(server.workers()) == 1


def test_a_worker_is_kept_with_its_models_and_replaced_with_others(tmp_path: Path) -> None:
    first = map_of(dict.fromkeys("ab", "null:4"), [replica("a", **TURNS), replica("b", **TURNS)])
    with running(tmp_path, first) as server:
        (before,) = server.workers()
        assert apply(server, tmp_path / "same.json", first) == 0
        assert [process.pid for process in server.workers()] == [before.pid]
        three = map_of(dict.fromkeys("abc", "null:4"), [replica(name, **TURNS) for name in "abc"])
        assert apply(server, tmp_path / "three.json", three) == 0
        assert [server.infer(model, [5.0])[0] for model in "abc"] == [200, 200, 200]
        (after,) = server.workers()
        assert after.pid != before.pid and len(_numbers(after.cmdline())) == 3
