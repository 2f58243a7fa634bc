"""How far published measurements are from the roofline of a device that was never profiled.

    python -m bench.roofline REFERENCE

REFERENCE holds igniter_v100/solo.csv (TensorRT on a V100) and parvagpu_a100/*.csv (PyTorch on an A100); the V100
profiles of Elvinger's thesis ship with gpuprof. Networks are built by the zoo. Prints measured over roofline, which is
what `gpuprof.estimators.measured.measured` takes for the interval of a figure that nothing on its device speaks for.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.v100_profiles import v100_profiles
from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.estimators.roofline import WorkByBatch, roofline_ms
from gpuprof.graph.load import load_graph
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build

NETWORKS = ("alexnet", "densenet121", "resnet50", "vgg19", "mobilenet_v2", "bert_base")
PUBLISHED_AS = {"bert": "bert_base"}
WHOLE_A100 = "7"


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    reference: Path = parser.parse_args().reference
    with tempfile.TemporaryDirectory() as folder:
        works = {name: _work(name, Path(folder)) for name in NETWORKS}
        by_source: dict[str, list[float]] = {}
        for source, kind, name, batch, latency_ms in measurements(reference):
            if name in works:
                ratio = latency_ms / roofline_ms(works[name].at(batch), device(kind), Share())
                by_source.setdefault(source, []).append(ratio)
    for source, ratios in by_source.items():
        middle = statistics.median(ratios)
        spread = max(max(ratios) / middle, middle / min(ratios))
        print(
            f"{source:28} {len(ratios):3} measurements: {min(ratios):.2f} to {max(ratios):.2f} times the roofline, "
            f"median {middle:.2f}, at most {spread:.1f} times from it"
        )
    return 0


def measurements(reference: Path) -> Iterator[tuple[str, str, str, int, float]]:
    """Yield source, device, network, batch and latency in ms of everything published of a whole device."""
    for row in v100_profiles().rows:
        if row.throughput_rps:
            name = PUBLISHED_AS.get(row.model, row.model)
            yield "V100, PyTorch (thesis)", "v100", name, row.batch, 1000.0 * row.batch / row.throughput_rps
    for line in _rows(reference / "igniter_v100" / "solo.csv"):
        if line["mps_share_pct"] == "100":
            yield "V100, TensorRT (iGniter)", "v100", line["model"], int(line["batch"]), float(line["latency_ms"])
    for path in sorted((reference / "parvagpu_a100").glob("*.csv")):
        if path.stem in NETWORKS:
            for line in _rows(path):
                alone = line["Mig instance"] == WHOLE_A100 and line["Workload Number"] == "1"
                if alone and float(line["Throughput"]) > 0.0:
                    batch = int(line["Batch size"])
                    latency = 1000.0 * batch / float(line["Throughput"])
                    yield "A100, PyTorch (ParvaGPU)", "a100-80", path.stem, batch, latency


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _work(name: str, folder: Path) -> WorkByBatch:
    path = folder / f"{name}.onnx"
    build(find_architecture(name), path)
    return WorkByBatch(lambda batch: load_graph(path, batch))


if __name__ == "__main__":
    raise SystemExit(main())
