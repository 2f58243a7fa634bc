"""Image networks in half precision on GPUs of which no measurement was learned from, beside published benchmarks.

    python -m bench.unseen_images [-o DIR]

`bench/image_results.csv` has images a second that others published, Apache-2.0 where no other is said:

* timm's authors of 26 architectures, picked by name before any of them was estimated, compiled by TorchInductor and
  eagerly, with the channels first or last (``results/benchmark-infer-*`` of their repository: RTX 3090 and 4090 by
  PyTorch 2.4; RTX 5090 and RTX PRO 6000 Max-Q by 2.9, the 25, 9 and 21 of the 26 that were read);
* NVIDIA of ResNet-50 from the batches on at which the GPU is the limit (PyTorch 1.9), and by TensorRT through
  PaddlePaddle (``PaddlePaddle/Classification``), both in DeepLearningExamples;
* PaddleClas of nine of these architectures by TensorRT on a T4 (``docs/en/models``). Its script
  (``tools/infer/predict.py``) sleeps 10 ms behind each run, so that the power limit is not reached, leaves
  TensorRT Paddle's default workspace, and times the copies of input and output with the run;
* Paddle Inference of two of them by TensorRT 8.0 on a T4, 1,000 runs of a few ms (``guides/benchmark/benchmark_gpu`` of
  its documentation, no licence stated);
* a user of TensorRT on a V100 (``sandeepkumar-skb/pytorch_experiments``, no licence stated).

Of the GPUs, float32 of V100 and T4 was learned from, and products in bfloat16 of the A100. Each network is exported
with random weights into DIR, which takes timm (and so torchvision) beside gpuprof's extra ``export``, and estimated
from the catalogue alone; eager execution runs batch normalisations.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import numpy as np

from gpuprof.domain.catalogue import device
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu.cross_gpu import shipped_model
from gpuprof.estimators.cross_gpu.kernels import KernelList, LaunchMode, list_kernels
from gpuprof.estimators.cross_gpu.rates import rates_of
from gpuprof.graph.load import load_graph

RESULTS = Path(__file__).with_name("image_results.csv")
_COMPILED = frozenset({"compiled", "TensorRT"})
#: Sources whose GPU rests between runs or runs for seconds only.
_RESTING = frozenset({"paddleclas", "inference"})
_OPSET = 17
_SIDES = {"inception_v3": 299}
_SIDE = 224


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A line of `RESULTS`."""

    source: str  #: ``"timm"``, ``"nvidia"``, ``"paddle"``, ``"paddleclas"``, ``"inference"`` (Paddle's) or ``"user"``.
    device: str
    precision: str
    execution: str  #: ``"compiled"``, ``"TensorRT"``, ``"eager"`` or ``"eager, channels last"``.
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
        return f"{self.source:11}{self.device:19}{self.precision:9} {self.execution:21}"

    @property
    def runtime(self) -> LaunchMode:
        """How it is estimated; of the order of channels an estimate knows nothing."""
        return LaunchMode.FUSED if self.execution in _COMPILED else LaunchMode.EAGER_FUSED

    @property
    def board(self) -> Device:
        """The GPU; the RTX PRO 6000 Max-Q is what its data sheet says beside the server edition of the catalogue."""
        if self.device != "rtx-pro-6000-max-q":
            return device(self.device)
        server = device("rtx-pro-6000")
        slower = 110.0 / 117.0
        rates = {name: rate * slower for name, rate in server.flops_per_s.items()}
        clock = server.clock_mhz * slower
        return replace(server, flops_per_s=rates, clock_mhz=clock, max_power_w=300.0, dram_bytes_per_s=1.792e12)


def main() -> int:
    """Print each network, and how far off each way of running it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the exports are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        exports = args.output or Path(folder)
        judged, unthrottled = defaultdict(list), defaultdict(list)
        for run in read_runs():
            figure = estimate(run, exports)
            judged[run.way].append((run, figure))
            if run.source in _RESTING:
                unthrottled[run.way].append(estimate_unthrottled(run, exports) / run.batch_ms - 1.0)
            print(f"{run.way} {run.model:29}{run.batch:5}{run.batch_ms:8.1f} ms, {describe(run, figure)}")
    print()
    for way, pairs in judged.items():
        errors = np.array([figure.value / run.batch_ms - 1.0 for run, figure in pairs])
        inside = np.mean([holds(run, figure) for run, figure in pairs])
        found = f"mean absolute error {100 * np.abs(errors).mean():.1f}%, median {100 * np.median(errors):+.1f}%"
        coverage = f"inside the 90% interval {100 * inside:.0f}%"
        rested = np.abs(unthrottled[way])
        clock = f"; at the boost clock {100 * rested.mean():.1f}%" if len(rested) else ""
        print(f"{way} {len(pairs):2} figures: {found}, {coverage}{describe_batches(pairs)}{clock}")
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
    return shipped_model().latency(_list_kernels(run, folder), run.board, Share(), run.precision, run.runtime)


def estimate_unthrottled(run: PublishedRun, folder: Path) -> float:
    """Return the time of a batch in ms where the GPU rests between batches, so that its power limit is not reached."""
    rates = replace(rates_of(run.board, run.precision), sustained=1.0)
    return 1e3 * shipped_model().time_parts(_list_kernels(run, folder), rates, run.runtime).total_s


def _list_kernels(run: PublishedRun, folder: Path) -> KernelList:
    folded = run.runtime is LaunchMode.FUSED
    path = folder / f"{run.model}{'' if folded else '-eager'}.onnx"
    if not path.is_file():
        export(run.model, path, folded=folded)
    return list_kernels(load_graph(path, run.batch), run.precision, run.runtime)


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


def describe_batches(pairs: Sequence[tuple[PublishedRun, Figure]]) -> str:
    """Return the median error at each batch where there are several."""
    errors = defaultdict(list)
    for run, figure in pairs:
        errors[run.batch].append(100.0 * (figure.value / run.batch_ms - 1.0))
    by_batch = (f"{batch} {np.median(of_batch):+.0f}" for batch, of_batch in sorted(errors.items()))
    return f" (by batch {', '.join(by_batch)})" if len(errors) > 2 else ""


def describe(run: PublishedRun, figure: Figure) -> str:
    """Return the estimate beside the measurement."""
    outside = "" if holds(run, figure) else ", outside the interval"
    return f"estimated {figure.value:.1f} ({100.0 * (figure.value / run.batch_ms - 1.0):+.0f}%){outside}"


if __name__ == "__main__":
    raise SystemExit(main())
