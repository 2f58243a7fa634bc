"""NVIDIA's perf_analyzer drives the server as it is; .ci/install-perf-analyzer.sh puts it here."""

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, map_of, replica, running

PROGRAM = shutil.which("perf_analyzer") or shutil.which("perf_analyzer", path=str(Path(sys.executable).parent))
pytestmark = [
    serves_in_real_time,
    pytest.mark.skipif(PROGRAM is None, reason="no perf_analyzer here: .ci/install-perf-analyzer.sh"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = {"small": "null:4", "large": "null:600k"}
    document = map_of(models, [replica("small", batch=4, max_wait_ms=1.0), replica("large")], slo_ms=60_000.0)
    with running(tmp_path_factory.mktemp("analyzed"), document, "--grpc-port", "0") as started:
        yield started


@pytest.mark.parametrize(
    ("model", "shape", "options"),
    [
        ("small", 1, ["-i", "http"]),
        ("small", 1, ["-i", "http", "--async"]),
        ("small", 1, ["-i", "http", "-b", "4"]),
        ("large", 150_000, ["-i", "http"]),
        ("small", 1, ["-i", "grpc"]),
        ("small", 1, ["-i", "grpc", "--async"]),
        ("small", 1, ["-i", "grpc", "--async", "--streaming"]),
        ("large", 150_000, ["-i", "grpc"]),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, list) else str(value),
)
def test_perf_analyzer(tmp_path: Path, server: RunningServer, model: str, shape: int, options: list[str]) -> None:
    assert PROGRAM is not None
    scheme = "grpc://" if "grpc" in options else "http://"
    address = next(word for word in server.line.split() if word.startswith(scheme)).removeprefix(scheme)
    short = ["--measurement-interval", "300", "--stability-percentage", "999", "--max-trials", "3"]
    before = _counts(server, model)
    completed = subprocess.run(
        [PROGRAM, "-m", model, "-u", address, "--shape", f"INPUT0:{shape}", "--concurrency-range", "3",
         "-f", str(tmp_path / "figures.csv"), *short, *options],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (row,) = csv.DictReader((tmp_path / "figures.csv").read_text().splitlines())
    assert float(row["Inferences/Second"]) > 0.0
    assert float(row["Server Compute Infer"]) >= 0.0  # it read our statistics before and after
    answered, failed = (after - first for after, first in zip(_counts(server, model), before, strict=True))
    assert answered > 0
    assert failed == 0


def _counts(server: RunningServer, model: str) -> tuple[int, int]:
    """Return how many requests the server has answered, and how many not."""
    statistics = server.get(f"/v2/models/{model}/stats")[1]["model_stats"][0]["inference_stats"]
    return statistics["success"]["count"], statistics["fail"]["count"]
