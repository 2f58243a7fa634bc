"""The estimators that ship with gpuprof keep the contract."""

from pathlib import Path

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import Estimator
from gpuprof.errors import PluginError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.contract import EstimatorContract
from gpuprof.estimators.database import DatabaseEstimator
from tests.estimators.rows import CPU, GPU, database, measured_row, two_layers, with_kernels


class TestMeasured(EstimatorContract):
    model, device = "net", CPU

    @pytest.fixture(autouse=True)
    def rows(self, tmp_path: Path) -> None:
        cases = [(batch, share) for batch in (1, 4, 16) for share in (25.0, 50.0, 100.0)]
        points = [
            measured_row(
                "net", batch, (1.0 + batch) * 100.0 / share, share=share, memory=10**6 * batch, std_ms=0.1, repeats=20
            )
            for batch, share in cases
        ]
        self.db = database(tmp_path / "db", points)

    def estimator(self) -> Estimator:
        return make_estimator("database", self.db)


class TestRooflineOfAGpu(EstimatorContract):
    device = device("a100-80")

    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.model = str(two_layers(tmp_path / "two.onnx"))

    def estimator(self) -> Estimator:
        return DatabaseEstimator(None)


class TestGk(EstimatorContract):
    device = GPU

    @pytest.fixture(autouse=True)
    def kernels(self, tmp_path: Path) -> None:
        self.model = str(two_layers(tmp_path / "two.onnx"))
        self.db = with_kernels(tmp_path / "db", Path(self.model))

    def estimator(self) -> Estimator:
        return make_estimator("gk", self.db)


def test_a_class_that_takes_no_database_is_refused() -> None:
    with pytest.raises(PluginError, match="cannot be made from a kernel database"):
        make_estimator("gpuprof.domain.estimate:Workload", None)
