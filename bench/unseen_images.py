"""Image networks in half precision on GPUs of which no measurement was learned from, beside timm's own benchmarks.

    python -m bench.unseen_images [-o DIR]

The authors of timm publish how many images a second its networks do (PyTorch 2.4, CUDA 12.4, automatic mixed precision;
``results/benchmark-infer-amp-*`` of their repository, Apache-2.0). `bench/timm_results.csv` has the figures of 26
architectures that were picked by name before any of them was estimated, compiled by TorchInductor and run eagerly with
the channels first or last. Each is exported with random weights into DIR, which takes timm (and so torchvision) beside
gpuprof's extra ``export``, and estimated from the catalogue alone.
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

RESULTS = Path(__file__).with_name("timm_results.csv")
_PRECISION, _OPSET = "float16", 17
_SIDES = {"inception_v3": 299}
_SIDE = 224


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A line of `RESULTS`."""

    device: str
    execution: str  #: ``"compiled"``, ``"eager"`` or ``"eager, channels last"``.
    batch: int
    model: str
    images_per_s: float

    @property
    def batch_ms(self) -> float:
        """The time of a batch."""
        return 1000.0 * self.batch / self.images_per_s

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
            judged[run.device, run.execution].append((run, figure))
            print(f"{run.device:9} {run.execution:21} {run.model:30} {run.batch_ms:8.1f} ms, {describe(run, figure)}")
    print()
    for (name, execution), pairs in judged.items():
        errors = np.array([figure.value / run.batch_ms - 1.0 for run, figure in pairs])
        inside = np.mean([holds(run, figure) for run, figure in pairs])
        print(
            f"{name:9} {execution:21} {len(pairs):2} networks: mean absolute error {100 * np.abs(errors).mean():.1f}%, "
            f"median {100 * np.median(errors):+.1f}%, inside the 90% interval {100 * inside:.0f}%"
        )
    return 0


def read_runs() -> Iterator[PublishedRun]:
    """Yield the published runs."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            speed = float(row["images_per_s"])
            yield PublishedRun(row["device"], row["execution"], int(row["batch"]), row["model"], speed)


def estimate(run: PublishedRun, folder: Path) -> Figure:
    """Return the time of a batch in ms; the network is exported into ``folder`` unless it is there."""
    path = folder / f"{run.model}.onnx"
    if not path.is_file():
        export(run.model, path)
    kernels = list_kernels(load_graph(path, run.batch), _PRECISION, run.runtime)
    return shipped_model().latency(kernels, device(run.device), Share(), _PRECISION, run.runtime)


def export(name: str, path: Path) -> None:
    """Write one of timm's networks with random weights and a free batch, attention in pieces."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    network = import_module("timm").create_model(name, pretrained=False, exportable=True).eval()
    for module in network.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    side = _SIDES.get(name, _SIDE)
    free = {"x": {0: "n"}, "y": {0: "n"}}
    settings = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": free, "opset_version": _OPSET}
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
