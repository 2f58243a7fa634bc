"""Workers that take turns in one part of a CPU: they serve, have the same cores, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reruns import serves_in_real_time
from tests.serving.running import map_of, replica, running

pytestmark = serves_in_real_time


def test_replicas_that_take_turns_are_served_from_the_same_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the workers meet
    turns = {"turns": 1, "latency_ms": 0.2}
    document = map_of(dict.fromkeys("abc", "null:4"), [replica("a", **turns), replica("b", **turns), replica("c")])
    with running(tmp_path, document) as server:
        for _ in range(20):
            for model in "abc":
                assert server.infer(model, [5.0])[0] == 200
        assert len(list(tmp_path.glob("gpuprof-turns-*"))) == 1
        cores = [tuple(worker.cpu_affinity()) for worker in server.workers()]
        assert len(cores) == 3 and len(set(cores)) == 2
    assert list(tmp_path.glob("gpuprof-turns-*")) == []
