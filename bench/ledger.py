"""Holds estimates against the whole models that others measured, and rebuilds the table of docs/accuracy.md.

    python -m bench.ledger [-o DIR] [--source NAME] [--check]

``gpuprof/datasets/ledger`` has the measurements of every source in one schema. Those of BERT and of networks of the
zoo are estimated, written with random weights into DIR (gpuprof's extra ``export``); of BERT, one layer and two, which
are alike. Nothing is
learned from these rows but the constants that `gpuprof.estimators.cross_gpu` names them as the source of. ``--check``
writes nothing and fails where a line of the table has become worse by more than 2 points and a tenth, or holds fewer
measurements.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import re
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bench.normalised_networks import write_unfolded
from gpuprof.domain.catalogue import device
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu.cross_gpu import shipped_model
from gpuprof.estimators.cross_gpu.kernels import KernelList, KernelsByBatch, LaunchMode
from gpuprof.estimators.cross_gpu.kernels import list_kernels as list_graph_kernels
from gpuprof.graph.load import load_graph
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "gpuprof" / "datasets" / "ledger"
PAGE = ROOT / "docs" / "accuracy.md"
_BEGIN, _END = "<!-- written by python -m bench.ledger -->\n", "<!-- end of ledger -->"
_OPSET = 17
#: Words in the exported models: a batch reads the rows of its own words only, whatever their number.
_WORDS = 1000
_Config = Mapping[str, int]
_WIDE: _Config = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_LARGE: _Config = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
#: Model → layers, and what else its configuration has.
_MODELS: Mapping[str, tuple[int, _Config]] = {
    "bert_base": (12, _WIDE),
    "bert_large": (24, _LARGE),
    "roberta_base": (12, _WIDE),
    "roberta_large": (24, _LARGE),
    "bert_dist6l": (6, _WIDE),
    "minilm_l6": (6, {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}),
    "bert_dist4l": (4, {"hidden_size": 288, "num_attention_heads": 12, "intermediate_size": 1152}),
}
#: Networks of timm → those of the zoo of the same layers.
_IMAGE_NETWORKS: Mapping[str, str] = {
    "densenet121": "densenet121",
    "mobilenetv2_100": "mobilenet_v2",
    "resnet101": "resnet101",
    "resnet18": "resnet18",
    "vgg19": "vgg19",
    "vit_base_patch16_224": "vit_base",
}
_SIDES = ("height", "width")
#: A line may become worse by so many points and by this factor; so many points of coverage may be lost.
_POINTS, _FACTOR, _COVERAGE_POINTS = 2.0, 1.1, 5.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """A row of ``measurements.csv``."""

    source: str
    device: str
    share: str
    runtime: str
    precision: str
    model: str
    size: str
    batch: str
    latency_ms: str
    throughput_rps: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: measurements of one source, runtime, precision and board."""

    name: str
    measurements: int
    error_pct: float  #: Mean absolute relative error.
    bias_pct: float  #: Median.
    inside_pct: float  #: Measurements inside the 90% interval.
    width: float  #: Median of the upper over the lower end.

    def __str__(self) -> str:
        figures = f"{self.error_pct:.1f} | {self.bias_pct:+.0f} | {self.inside_pct:.0f} | {self.width:.1f}"
        return f"| {self.name} | {self.measurements} | {figures} |"


def read_measurements() -> list[Measurement]:
    """Return every measurement. Raises `ValueError` when the file is not the one that the sources were written for."""
    content = (FOLDER / "measurements.csv").read_bytes()
    if hashlib.sha256(content).hexdigest() != _read_sources()["sha256"]:
        raise ValueError("measurements.csv is not the file that sources.toml has the hash of")
    return [Measurement(**row) for row in csv.DictReader(content.decode().splitlines())]


@cache
def _read_sources() -> Mapping[str, Any]:
    return tomllib.loads((FOLDER / "sources.toml").read_text(encoding="utf-8"))


def main() -> int:
    """Write or check the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the exports are kept")
    parser.add_argument("--source", action="append", help="judge by these sources, and keep the lines of the others")
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    args = parser.parse_args()
    measurements = read_measurements()
    judged = [entry for entry in measurements if not args.source or entry.source in args.source]
    published_lines = read_table(PAGE.read_text(encoding="utf-8"))
    kept = [line for line in published_lines if args.source and line.name.partition(":")[0] not in args.source]
    with tempfile.TemporaryDirectory() as folder:
        lines = sorted([*kept, *judge(judged, args.output or Path(folder))], key=lambda line: line.name)
    if args.check:
        worse = find_worse(published_lines, lines)
        print("\n".join(worse) or "no line is worse")
        return int(bool(worse))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(before + _BEGIN + write_table(lines, measurements) + _END + after, encoding="utf-8")
    return 0


def judge(measurements: Iterable[Measurement], folder: Path) -> Iterator[Line]:
    """Yield a line for each source, runtime, precision and board, batches of one apart."""
    groups: dict[tuple[str, str, str, str, str], list[tuple[float, Figure]]] = defaultdict(list)
    for entry in measurements:
        if is_estimated(entry):
            batches = "batch 1" if entry.batch == "1" else "larger batches"
            key = (entry.source, entry.runtime, entry.precision, entry.device, batches)
            groups[key].append((find_latency_ms(entry), estimate(entry, folder)))
    for key, pairs in sorted(groups.items()):
        errors = np.array([figure.value / measured_ms - 1.0 for measured_ms, figure in pairs])
        inside = [(figure.low or 0.0) <= measured_ms <= figure.upper() for measured_ms, figure in pairs]
        widths = [figure.upper() / (figure.low or figure.value) for _, figure in pairs]
        name = f"{key[0]}: {', '.join(key[1:])}"
        figures = (100.0 * np.abs(errors).mean(), 100.0 * np.median(errors), 100.0 * np.mean(inside), np.median(widths))
        yield Line(name, len(pairs), *(round(float(entry), 1) for entry in figures))


def is_estimated(entry: Measurement) -> bool:
    """Return whether the network of a measurement can be exported here, with inputs of a known size."""
    return bool(entry.size) and (entry.model in _MODELS or entry.model in _IMAGE_NETWORKS)


def find_latency_ms(entry: Measurement) -> float:
    """Return the measured time of a batch."""
    return float(entry.latency_ms or 1e3 * int(entry.batch) / float(entry.throughput_rps))


def estimate(entry: Measurement, folder: Path) -> Figure:
    """Return the time of a batch in ms; layers are exported into ``folder`` unless they are there."""
    mode = LaunchMode(entry.runtime)
    return shipped_model().latency(list_kernels(entry, folder), find_board(entry), Share(), entry.precision, mode)


def find_board(entry: Measurement) -> Device:
    """Return the board of a measurement under its source's power limit, where that is below the catalogue's."""
    board = device(entry.device)
    return replace(board, max_power_w=_read_sources()["sources"][entry.source].get("power_w", board.max_power_w))


def list_kernels(entry: Measurement, folder: Path) -> KernelList:
    """Return the kernels of a measured batch; networks are written into ``folder`` unless they are there."""
    name, mode = entry.model, LaunchMode(entry.runtime)
    if name in _IMAGE_NETWORKS:
        return _list_image_kernels(name, int(entry.size), int(entry.batch), entry.precision, mode, folder)
    one_layer, two = (
        _follow_batch(name, int(entry.size), layers, entry.precision, mode, folder).at(int(entry.batch))
        for layers in (1, 2)
    )
    return _deepen(one_layer, two, _MODELS[name][0])


def write_table(lines: Sequence[Line], measurements: Sequence[Measurement]) -> str:
    """Return the table, and the number of measurements that were not estimated, as Markdown."""
    head = "| measurements | number | mean absolute error, % | median, % | inside the 90% interval, % | width |"
    rows = "\n".join(map(str, lines))
    other_sources = Counter(entry.source for entry in measurements if not is_estimated(entry))
    counts = ", ".join(f"{count:,} of {source}" for source, count in sorted(other_sources.items()))
    return f"\n{head}\n|{' --- |' * 6}\n{rows}\n\nNot estimated, their networks being in no file here: {counts}.\n\n"


def read_table(page: str) -> list[Line]:
    """Return the lines of the table that a page holds."""
    _, _, rest = page.partition(_BEGIN)
    table, _, _ = rest.partition(_END)
    cells = [re.split(r" \| ", row.strip("| \n")) for row in table.splitlines() if row.startswith("| ") and ": " in row]
    return [Line(name, int(count), *map(float, figures)) for name, count, *figures in cells]


def find_worse(before: Sequence[Line], after: Sequence[Line]) -> list[str]:
    """Return in words which lines have become worse, or are missing."""
    now = {line.name: line for line in after}
    worse = []
    for line in before:
        new = now.get(line.name)
        if new is None or new.measurements < line.measurements:
            worse.append(f"{line.name}: {line.measurements} measurements, now {new.measurements if new else 0}")
        elif new.error_pct > max(line.error_pct + _POINTS, _FACTOR * line.error_pct):
            worse.append(f"{line.name}: error {line.error_pct:.1f}%, now {new.error_pct:.1f}%")
        elif new.inside_pct < line.inside_pct - _COVERAGE_POINTS:
            worse.append(f"{line.name}: {line.inside_pct:.0f}% inside the interval, now {new.inside_pct:.0f}%")
    return worse


@cache
def _follow_batch(
    name: str, length: int, layers: int, precision: str, mode: LaunchMode, folder: Path
) -> KernelsByBatch:
    path = folder / f"{name}-{layers}.onnx"
    if not path.is_file():
        _export(name, layers, path)
    return KernelsByBatch(partial(_load_graph, path, length), precision, mode)


@cache
def _load_graph(path: Path, length: int, batch: int) -> ModelGraph:
    return load_graph(path, batch, dims={"length": length})


def _deepen(one_layer: KernelList, two: KernelList, layers: int) -> KernelList:
    """Return the kernels of so many alike layers from those of one layer and of two."""
    in_one, in_two = _count_kernels(one_layer), _count_kernels(two)
    counts = tuple((layers - 1) * (in_two[key] - in_one[key]) + in_one[key] for key in in_two)
    places = {key: place for place, key in enumerate(_keys(two))}
    kept = [places[key] for key in in_two]
    return replace(
        two, ops=two.ops.take(np.array(kept)), count=counts, op_types=tuple(two.op_types[place] for place in kept)
    )


def _keys(kernels: KernelList) -> list[Any]:
    return list(zip(kernels.op_types, *(column.tolist() for column in astuple(kernels.ops)), strict=True))


def _count_kernels(kernels: KernelList) -> Counter[Any]:
    counted: Counter[Any] = Counter()
    for key, count in zip(_keys(kernels), kernels.count, strict=True):
        counted[key] += count
    return counted


@cache
def _list_image_kernels(name: str, side: int, batch: int, precision: str, mode: LaunchMode, folder: Path) -> KernelList:
    path = folder / f"{name}{'-eager' if mode.is_eager else ''}.onnx"
    if not path.is_file():
        _write_image_network(_IMAGE_NETWORKS[name], path, unfolded=mode.is_eager)
    return list_graph_kernels(load_graph(path, batch, dims=dict.fromkeys(_SIDES, side)), precision, mode)


def _write_image_network(name: str, path: Path, *, unfolded: bool) -> None:
    """Write a network of the zoo for images of any size, with or without batch normalisations of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    build(find_architecture(name), path)
    if unfolded:
        write_unfolded(name, path, path)
    model = onnx.load(str(path))
    (image,) = (info for info in model.graph.input if len(info.type.tensor_type.shape.dim) == 4)
    for dim, side in zip(image.type.tensor_type.shape.dim[2:], _SIDES, strict=True):
        dim.dim_param = side
    del model.graph.value_info[:]  # has the sizes of the original
    onnx.save(model, str(path))


def _export(name: str, layers: int, path: Path) -> None:
    """Write a BERT that answers questions, with random weights, a free batch and length, and attention in pieces."""
    import torch
    import transformers as library

    path.parent.mkdir(parents=True, exist_ok=True)
    transformers: Any = library  # its types know no fields of configurations
    config = transformers.BertConfig(**_MODELS[name][1], vocab_size=_WORDS, num_hidden_layers=layers, return_dict=False)
    config._attn_implementation = "eager"
    network = transformers.BertForQuestionAnswering(config).eval()
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    names = {"input_names": ["tokens", "mask"], "output_names": ["start", "end"]}
    free = {name: {0: "n", 1: "length"} for name in ("tokens", "mask", "start", "end")}
    settings = {"dynamo": False, "opset_version": _OPSET, "dynamic_axes": free, **names}
    torch.onnx.export(network, (tokens, torch.ones_like(tokens)), path, **settings)


if __name__ == "__main__":
    sys.exit(main())
