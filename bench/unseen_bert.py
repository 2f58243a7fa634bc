"""BERT in half precision on GPUs that were not measured, beside what NVIDIA published of TensorRT.

    python -m bench.unseen_bert [-o DIR]

`bench/bert_results.csv` has the mean latencies of BERT-base and -large with 128 and 384 tokens that the README of
``demo/BERT`` in NVIDIA's TensorRT repository (Apache-2.0) gives by batch: A100 40GB, L4 and L40S of a later version
(whose contents name the table of the L4; its heading says A30, which an earlier table shows to be twice as fast), A30
and T4 of an earlier one, V100 of release 8.0. Copies to and from the GPU are not in them. One and two layers are
exported with random weights into DIR, which takes gpuprof's extra ``export``; layers are alike.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu.cross_gpu import shipped_model
from gpuprof.estimators.cross_gpu.kernels import KernelList, LaunchMode, list_kernels
from gpuprof.graph.load import load_graph

RESULTS = Path(__file__).with_name("bert_results.csv")
_OPSET = 17
#: Model → layers, and what else its configuration has.
_MODELS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "bert_base": (12, {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "bert_large": (24, {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}),
}


@dataclass(frozen=True, slots=True)
class PublishedLatency:
    """A line of `RESULTS`."""

    device: str
    precision: str
    model: str
    length: int  #: Tokens.
    batch: int
    batch_ms: float


def main() -> int:
    """Print each latency, and by GPU how far off its estimates are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the exports are kept")
    args = parser.parse_args()
    judged: dict[str, list[tuple[PublishedLatency, Figure]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for run in read_latencies():
            figure = estimate(run, args.output or Path(folder))
            judged[run.device].append((run, figure))
            print(
                f"{run.device:9}{run.model:11}{run.length:4} tokens{run.batch:5}{run.batch_ms:9.2f} ms, "
                f"estimated {figure.value:.2f} ({100.0 * (figure.value / run.batch_ms - 1.0):+.0f}%)"
            )
    print()
    for gpu, pairs in judged.items():
        errors = np.array([figure.value / run.batch_ms - 1.0 for run, figure in pairs])
        small = np.array([run.batch * run.length <= 2048 for run, _ in pairs])
        inside = np.mean([figure.low <= run.batch_ms <= figure.high for run, figure in pairs])  # type: ignore[operator]
        print(
            f"{gpu:9}{len(pairs):3} figures: mean absolute error {100 * np.abs(errors).mean():.1f}%, median "
            f"{100 * np.median(errors):+.1f}% (up to 2,048 tokens {100 * np.median(errors[small]):+.1f}%), inside the "
            f"90% interval {100 * inside:.0f}%"
        )
    return 0


def read_latencies() -> Iterator[PublishedLatency]:
    """Yield the published latencies."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            sizes = int(row["length"]), int(row["batch"]), float(row["batch_ms"])
            yield PublishedLatency(row["device"], row["precision"], row["model"], *sizes)


def estimate(run: PublishedLatency, folder: Path) -> Figure:
    """Return the time of a batch in ms; the layers are exported into ``folder`` unless they are there."""
    kernels = _list_kernels(run.model, run.length, run.batch, run.precision, folder)
    return shipped_model().latency(kernels, device(run.device), Share(), run.precision, LaunchMode.TENSORRT_FUSED)


@cache
def _list_kernels(name: str, length: int, batch: int, precision: str, folder: Path) -> KernelList:
    lists = []
    for layers in (1, 2):
        path = folder / f"{name}-{length}-{layers}.onnx"
        if not path.is_file():
            export(name, length, layers, path)
        lists.append(list_kernels(load_graph(path, batch), precision, LaunchMode.TENSORRT_FUSED))
    return deepen(lists[0], lists[1], _MODELS[name][0])


def deepen(one: KernelList, two: KernelList, layers: int) -> KernelList:
    """Return the kernels of so many alike layers from those of one layer and of two."""
    in_one, in_two = _count_kernels(one), _count_kernels(two)
    counts = tuple((layers - 1) * (in_two[key] - in_one[key]) + in_one[key] for key in in_two)
    places = {key: place for place, key in enumerate(_keys(two))}
    kept = [places[key] for key in in_two]
    return KernelList(two.ops.take(np.array(kept)), counts, tuple(two.op_types[place] for place in kept), two.unknown)


def _keys(kernels: KernelList) -> list[Any]:
    return list(zip(kernels.op_types, *(column.tolist() for column in astuple(kernels.ops)), strict=True))


def _count_kernels(kernels: KernelList) -> Counter[Any]:
    counted: Counter[Any] = Counter()
    for key, count in zip(_keys(kernels), kernels.count, strict=True):
        counted[key] += count
    return counted


def export(name: str, length: int, layers: int, path: Path) -> None:
    """Write a BERT that answers questions, with random weights, a free batch and attention in pieces."""
    import torch
    import transformers as library

    path.parent.mkdir(parents=True, exist_ok=True)
    transformers: Any = library  # its types know no fields of configurations
    config = transformers.BertConfig(**_MODELS[name][1], num_hidden_layers=layers, return_dict=False)
    config._attn_implementation = "eager"
    network = transformers.BertForQuestionAnswering(config).eval()
    tokens = torch.zeros(2, length, dtype=torch.int64)
    names = {"input_names": ["tokens"], "output_names": ["start", "end"]}
    free = {name: {0: "n"} for name in ("tokens", "start", "end")}
    torch.onnx.export(network, (tokens,), path, dynamo=False, opset_version=_OPSET, dynamic_axes=free, **names)


if __name__ == "__main__":
    raise SystemExit(main())
