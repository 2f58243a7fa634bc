"""Any estimator is judged on models or devices that its database lacks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.domain.catalogue import devices
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.held_out import copy_without, estimate_held_out
from gpuprof.kernel_db.store import KernelDb
from tests.estimators.rows import database, measured_row


class MeanOfOthers:
    """Estimates the mean of all latencies in the database."""

    def __init__(self, db: KernelDb) -> None:
        self.models = set(db.read_table("models", ["model"])["model"].to_pylist())
        self.mean_ms = statistics.fmean(db.read_table("models", ["latency_mean_ms"])["latency_mean_ms"].to_pylist())

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        if model == "refused":
            raise InputError("refused is refused")
        figure = Figure(self.mean_ms, "mean", 0.5 * self.mean_ms, 1.5 * self.mean_ms)
        return Estimate(workload=Workload(model, batch, share, processes), device=device.name, latency_ms=figure)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return (1,)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return (Share(),)


@pytest.fixture
def db(tmp_path: Path) -> KernelDb:
    times_ms = {"a": 1.0, "b": 2.0, "refused": 6.0}
    return database(tmp_path / "db", [measured_row(name, 1, ms, device="v100") for name, ms in times_ms.items()])


def test_each_model_is_estimated_from_the_others(db: KernelDb) -> None:
    latencies = estimate_held_out(f"{__name__}:MeanOfOthers", db, "models", devices().__getitem__)
    errors = {latency.model: (latency.measured_ms, latency.predicted_ms, latency.is_inside) for latency in latencies}
    assert errors == {"a": (1.0, 4.0, False), "b": (2.0, 3.5, True), "refused": (6.0, None, None)}


def test_a_copy_lacks_every_row_of_the_model(db: KernelDb, tmp_path: Path) -> None:
    copy = copy_without(db, "model", "a", tmp_path / "copy")
    assert MeanOfOthers(copy).models == {"b", "refused"}


def test_the_command_prints_errors_coverage_and_what_has_no_estimate(
    db: KernelDb, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "--estimator", f"{__name__}:MeanOfOthers", "--db", str(db.path), "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)
    assert (row["count"], row["mean_pct"], row["coverage_pct"]) == (2, pytest.approx(187.5), 50.0)
    assert "no estimate for 1 of 3 latencies" in captured.err


def test_one_device_cannot_be_left_out(db: KernelDb, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "--estimator", "database", "--db", str(db.path), "--leave-out", "devices"]
    assert main(words) == 3
    assert "holds 1 device, but holding out devices takes at least 2" in capsys.readouterr().err
