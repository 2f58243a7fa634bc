"""Image networks in half precision on GPUs of which no measurement was learned from, beside published benchmarks.

    python -m bench.unseen_images [-o DIR]

`bench/image_results.csv` has images a second that others published: timm's authors of 26 architectures, picked by name
before any of them was estimated, compiled by TorchInductor and eagerly, with the channels first or last (PyTorch 2.4,
CUDA 12.4, automatic mixed precision; ``results/benchmark-infer-amp-*`` of their repository, Apache-2.0), and NVIDIA of
ResNet-50 from the batches on at which the GPU is the limit (PyTorch 1.9; DeepLearningExamples, Apache-2.0; float32 of
these two GPUs was learned from). Each is exported with random weights into DIR, which takes timm (and so torchvision)
beside gpuprof's extra ``export``, and estimated from the catalogue alone; eager execution runs batch normalisations.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu.cross_gpu import shipped_model
from gpuprof.estimators.cross_gpu.kernels import LaunchMode, list_kernels
from gpuprof.graph.load import load_graph

RESULTS = Path(__file__).with_name("image_results.csv")
_OPSET = 17
_SIDES = {"inception_v3": 299}
_SIDE = 224


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A line of `RESULTS`."""

    source: str  #: ``"timm"`` or ``"nvidia"``.
    device: str
    precision: str
    execution: str  #: ``"compiled"``, ``"eager"`` or ``"eager, channels last"``.
    batch: int
    model: str
    images_per_s: float

    @property
    def batch_ms(self) -> float:
        """The time of a batch."""
        return 1000.0 * self.batch / self.images_per_s

    @property
    def way(self) -> str:
        """Who ran it, where and how."""
        return f"{self.source:7}{self.device:9}{self.precision:8} {self.execution:21}"

    @property
    def runtime(self) -> LaunchMode:
        """How it is estimated; of the order of channels an estimate knows nothing."""
        return LaunchMode.FUSED if self.execution == "compiled" else LaunchMode.EAGER


def main() -> int:
    """Print each network, and how far off each way of running it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the exports are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        judged = defaultdict(list)
        for run in read_runs():
            figure = estimate(run, args.output or Path(folder))
            judged[run.way].append((run, figure))
            print(f"{run.way} {run.model:29}{run.batch:5}{run.batch_ms:8.1f} ms, {describe(run, figure)}")
    print()
    for way, pairs in judged.items():
        errors = np.array([figure.value / run.batch_ms - 1.0 for run, figure in pairs])
        inside = np.mean([holds(run, figure) for run, figure in pairs])
        print(
            f"{way} {len(pairs):2} figures: mean absolute error {100 * np.abs(errors).mean():.1f}%, "
            f"median {100 * np.median(errors):+.1f}%, inside the 90% interval {100 * inside:.0f}%"
        )
    return 0


def read_runs() -> Iterator[PublishedRun]:
    """Yield the published runs."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            speed = float(row["images_per_s"])
            way = row["source"], row["device"], row["precision"], row["execution"]
            yield PublishedRun(*way, int(row["batch"]), row["model"], speed)


def estimate(run: PublishedRun, folder: Path) -> Figure:
    """Return the time of a batch in ms; the network is exported into ``folder`` unless it is there."""
    folded = run.runtime is LaunchMode.FUSED
    path = folder / f"{run.model}{'' if folded else '-eager'}.onnx"
    if not path.is_file():
        export(run.model, path, folded=folded)
    kernels = list_kernels(load_graph(path, run.batch), run.precision, run.runtime)
    return shipped_model().latency(kernels, device(run.device), Share(), run.precision, run.runtime)


def export(name: str, path: Path, *, folded: bool) -> None:
    """Write one of timm's networks with random weights and a free batch, attention in pieces; batch normalisations
    folded into the convolutions, or as they are.
    """
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    network = import_module("timm").create_model(name, pretrained=False, exportable=True).eval()
    for module in network.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    side = _SIDES.get(name, _SIDE)
    free = {"x": {0: "n"}, "y": {0: "n"}}
    settings: dict[str, object] = {
        "input_names": ["x"],
        "output_names": ["y"],
        "dynamic_axes": free,
        "opset_version": _OPSET,
    }
    if not folded:
        settings |= {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
    torch.onnx.export(network, (torch.randn(2, 3, side, side),), path, dynamo=False, **settings)


def holds(run: PublishedRun, figure: Figure) -> bool:
    """Return whether the interval holds what was measured."""
    assert figure.low is not None and figure.high is not None
    return figure.low <= run.batch_ms <= figure.high


def describe(run: PublishedRun, figure: Figure) -> str:
    """Return the estimate beside the measurement."""
    outside = "" if holds(run, figure) else ", outside the interval"
    return f"estimated {figure.value:.1f} ({100.0 * (figure.value / run.batch_ms - 1.0):+.0f}%){outside}"


if __name__ == "__main__":
    raise SystemExit(main())
