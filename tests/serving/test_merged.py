"""Serving several models with one merged graph, over a real server and real workers."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from gpuprof.merging.pipeline import MergeOptions, propose_merges
from tests.command_line import CommandLine
from tests.merging.models import Array, finetune_model, residual, save, transformer
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, map_of, replica, running

pytestmark = serves_in_real_time

LENGTH = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two fine-tuned transformers and the merged file of both."""
    directory = tmp_path_factory.mktemp("merged")
    base = transformer(layers=2)
    paths = [save(finetune_model(base, 0.7, seed), directory, name) for seed, name in ((1, "tuned-a"), (2, "tuned-b"))]
    propose_merges(paths, MergeOptions(force=True), ["a", "b"]).merges[0].write(directory / "both.onnx")
    return directory


def merged_map(files: Path, **more: Any) -> dict[str, Any]:
    merged = replica("both", batch=8, sm_share_pct=100.0, latency_ms=2.0, **more)
    merged["rate_rps"] = 100.0
    document = map_of({"both": str(files / "both.onnx")}, [merged])
    model = document["models"]["both"]
    model["rate_rps"] = 100.0
    model["members"] = {
        name: {"path": str(files / f"tuned-{name}.onnx"), "rate_rps": 50.0, "slo_ms": model["slo_ms"]}
        for name in ("a", "b")
    }
    return document


def apart_map(files: Path) -> dict[str, Any]:
    models = {"a": str(files / "tuned-a.onnx"), "b": str(files / "tuned-b.onnx")}
    return map_of(models, [replica(name, batch=8, latency_ms=2.0) for name in models])


class Originals:
    """What the models give that were merged."""

    def __init__(self, files: Path) -> None:
        self._sessions = {
            name: ort.InferenceSession(str(files / f"tuned-{name}.onnx"), providers=["CPUExecutionProvider"])
            for name in ("a", "b")
        }

    def logits(self, model: str, ids: Array, mask: Array) -> Array:
        return np.asarray(self._sessions[model].run(["logits"], {"ids": ids, "mask": mask})[0])


def ask(server: RunningServer, model: str, rows: int, seed: int) -> tuple[Array, Array, Array]:
    """Return ids, mask and the server's logits."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 50, (rows, LENGTH))
    mask = np.ones((rows, LENGTH), np.int64)
    mask[:, LENGTH - seed % 3 :] = 0
    inputs = [
        {"name": name, "datatype": "INT64", "shape": list(value.shape), "data": value.ravel().tolist()}
        for name, value in (("mask", mask), ("ids", ids))  # not in the model's order
    ]
    status, answer = server.get(f"/v2/models/{model}/infer", "POST", json.dumps({"inputs": inputs}).encode())
    assert status == 200, answer
    (output,) = answer["outputs"]
    assert output["name"] == "logits"
    return ids, mask, np.array(output["data"], np.float32).reshape(output["shape"])


def check_both(server: RunningServer, originals: Originals, seeds: range) -> None:
    for seed in seeds:
        for model in ("a", "b"):
            check_one(server, originals, model, seed)


def check_one(server: RunningServer, originals: Originals, model: str, seed: int) -> None:
    ids, mask, logits = ask(server, model, 1 + seed % 3, seed)
    np.testing.assert_allclose(logits, originals.logits(model, ids, mask), rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def server(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("serve"), merged_map(files)) as server:
        yield server


def test_each_model_is_answered_under_its_own_name_as_by_its_own_file(server: RunningServer, files: Path) -> None:
    check_both(server, Originals(files), range(4))
    for name in ("a", "b"):
        metadata = server.get(f"/v2/models/{name}")[1]
        assert metadata["name"] == name
        assert {tensor["name"] for tensor in metadata["inputs"]} == {"ids", "mask"}
        assert [tensor["name"] for tensor in metadata["outputs"]] == ["logits"]
    assert server.get("/v2/models/both")[0] == 404


def test_requests_of_both_models_share_calls_and_none_gets_anothers_answer(server: RunningServer, files: Path) -> None:
    originals = Originals(files)
    wrong: list[str] = []

    def client(model: str, first: int) -> None:
        for seed in range(first, first + 12):
            ids, mask, logits = ask(server, model, 1 + seed % 3, seed)
            if not np.allclose(logits, originals.logits(model, ids, mask), rtol=2e-4, atol=2e-5):
                wrong.append(f"{model} {seed}")

    clients = [threading.Thread(target=client, args=(m, 100 * k)) for k in range(4) for m in ("a", "b")]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert wrong == []
    stats = {name: server.get(f"/v2/models/{name}/stats")[1]["model_stats"][0] for name in ("a", "b")}
    rows = sum(1 + seed % 3 for k in range(4) for seed in range(100 * k, 100 * k + 12))
    for model in stats.values():
        assert model["inference_count"] >= rows
        assert model["execution_count"] < model["inference_count"]
        assert model["inference_stats"]["fail"]["count"] == 0


def test_a_request_that_does_not_fit_its_model_is_refused_in_its_models_words(server: RunningServer) -> None:
    body = {"inputs": [{"name": "ids", "datatype": "INT64", "shape": [1, LENGTH], "data": [1] * LENGTH}]}
    status, answer = server.get("/v2/models/a/infer", "POST", json.dumps(body).encode())
    assert status == 400
    assert "mask" in answer["error"]
    assert "tuned" not in answer["error"]


@pytest.mark.slow
def test_apply_merges_and_separates_models_and_loses_nothing(files: Path, tmp_path: Path, cli: CommandLine) -> None:
    originals = Originals(files)
    failed: list[BaseException] = []
    stop = threading.Event()
    with running(tmp_path, merged_map(files)) as server:

        def client(first: int) -> None:
            seed = first
            while not stop.is_set():
                try:
                    check_both(server, originals, range(seed, seed + 1))
                except BaseException as error:
                    failed.append(error)
                    return
                seed += 1

        clients = [threading.Thread(target=client, args=(1000 * k,)) for k in range(2)]
        for thread in clients:
            thread.start()
        try:
            for document, started in ((apart_map(files), {"a/0", "b/0"}), (merged_map(files), {"both/0"})):
                path = tmp_path / "next.json"
                path.write_text(json.dumps(document))
                rows = cli.json("apply", path, "--port", server.port)
                assert {row["replica"] for row in rows if row["change"] == "started"} == started
                time.sleep(0.2)
        finally:
            stop.set()
            for thread in clients:
                thread.join()
    assert failed == []


def test_a_map_whose_merged_file_is_none_is_refused_in_one_line(files: Path, tmp_path: Path, cli: CommandLine) -> None:
    document = merged_map(files)
    document["models"]["both"]["path"] = str(save(residual(), tmp_path, "other"))
    path = tmp_path / "map.json"
    path.write_text(json.dumps(document))
    assert "it is not a merged model" in cli("serve", path, "--port 0", code=3).err
