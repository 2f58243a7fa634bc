"""Peak memory of models: measured, on the line between batches, weights and activations, or unknown."""

from __future__ import annotations

from pathlib import Path

from gpuprof.domain.estimate import INTERPOLATED, MEASURED, Workload
from gpuprof.domain.share import Share
from gpuprof.estimators.measured.known_models import KnownModels
from gpuprof.estimators.model_memory import ModelMemory
from tests.estimators.rows import CPU, database, measured_row, two_layers


def test_memory_between_measured_batches_is_on_their_line(tmp_path: Path) -> None:
    rows = [measured_row("net", batch, 2.0, memory=500 + 1000 * batch) for batch in (1, 4, 8)]
    known = KnownModels(database(tmp_path / "db", rows), None)
    memory, net = ModelMemory(known, lambda device: None), known.find_model("net")
    four, six = (memory.peak(net, CPU, Workload("net", batch, Share())) for batch in (4, 6))
    assert four is not None and (four.value, four.source) == (4500.0, MEASURED)
    assert six is not None and (six.value, six.source) == (6500.0, INTERPOLATED)


def test_a_batch_fits_while_its_predicted_peak_is_within_the_share(tmp_path: Path) -> None:
    known = KnownModels(None, None)
    model = known.find_model(str(two_layers(tmp_path / "two.onnx", width=64)))
    memory = ModelMemory(known, lambda device: None)
    per_item = 2 * 64 * 4
    largest = int(CPU.memory_bytes(Share()) - 2 * 64 * 64 * 4) // per_item
    assert memory.fits(model, CPU, largest, Share())
    assert not memory.fits(model, CPU, largest + 1, Share())


def test_where_nothing_tells_the_memory_a_batch_is_taken_to_fit(tmp_path: Path) -> None:
    known = KnownModels(database(tmp_path / "db", [measured_row("net", 1, 2.0)]), None)
    memory, net = ModelMemory(known, lambda device: None), known.find_model("net")
    assert memory.peak(net, CPU, Workload("net", 64, Share())) is None
    assert memory.fits(net, CPU, 64, Share())
