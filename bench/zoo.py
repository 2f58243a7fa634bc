"""Builds the networks of the zoo and compares their parameters and FLOPs with published figures.

    python bench/zoo.py [NAME…] [--directory DIR]

Prints for each network the seconds to build, to read the first time and at another batch, the file's size, ops,
FLOPs at batch 1, and how far parameters and FLOPs are from what is published; fails where that is more than said.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.runtime.session import open_session
from gpuprof.zoo.architecture import ARCHITECTURES, find_architecture
from gpuprof.zoo.build import build

#: Parameters in millions and multiply-adds in billions, as the papers or the libraries' model cards give them:
#: Krizhevsky et al. 2012 (with groups, 227² pixels there); Huang et al. 2017; Szegedy et al. 2015; He et al. 2016;
#: Iandola et al. 2016; Simonyan and Zisserman 2015; Devlin et al. 2019; Radford et al. 2019; Raffel et al. 2020;
#: the BLOOM model card; Dosovitskiy et al. 2021; Sandler et al. 2018; Tan and Le 2019. Multiply-adds of language
#: models: (parameters outside of tables) × 128 tokens, and attention. None: no published figure for this variant.
PUBLISHED: dict[str, tuple[float | None, float | None]] = {
    "alexnet": (60.97, 0.66),
    "densenet121": (7.98, 2.87),
    "inception_v1": (7.0, 1.5),
    "resnet50": (25.56, 4.1),
    "squeezenet": (1.24, 0.35),
    "vgg19": (143.67, 19.6),
    "bert_base": (109.5, 11.2),
    "gpt2": (124.4, 11.2),
    "t5_small": (60.5, None),
    "bloom_560m": (559.2, 39.4),
    "xlnet_base": (116.7, None),
    "vit_base": (86.6, 17.6),
    "resnet18": (11.69, 1.82),
    "resnet101": (44.55, 7.8),
    "mobilenet_v2": (3.5, 0.30),
    "efficientnet_b7": (66.3, 37.0),
}
#: What counts differ by: statistics of normalisations, elementwise ops beside the products, rounding in print.
ALLOWED_PCT = 8.0


def measure(name: str, directory: Path) -> dict[str, float]:
    """Return the figures of one network; its answers at batch 1 and 4 must agree."""
    path = directory / f"{name}.onnx"
    start = time.perf_counter()
    build(find_architecture(name), path)
    built = time.perf_counter()
    graph = load_graph(path)
    read = time.perf_counter()
    four = load_graph(path, 4)
    again = time.perf_counter()
    _check_answers(path, four)
    model = onnx.load(path, load_external_data=False)
    parameters = sum(int(np.prod(t.dims)) for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)
    return {
        "build_s": built - start,
        "read_s": read - built,
        "again_s": again - read,
        "size_mib": sum(file.stat().st_size for file in directory.glob(f"{name}.onnx*")) / 2**20,
        "ops": len(graph.ops),
        "parameters": parameters,
        "gflop": graph.flops / 1e9,
    }


def _check_answers(path: Path, graph: object) -> None:
    inputs = random_inputs(graph)  # type: ignore[arg-type]
    session = open_session(path, threads=2)
    four = session.run(None, inputs)[0]
    one = session.run(None, {name: value[1:2] for name, value in inputs.items()})[0]
    scale = float(np.abs(one).max())
    if not np.isfinite(four).all() or float(np.abs(four[1:2] - one).max()) > 1e-3 * scale or four.std() < 1e-6 * scale:
        sys.exit(f"{path.name} answers a batch otherwise than one by one, or always the same")


def _off(value: float, published: float | None) -> str:
    return "–" if published is None else f"{100 * (value / published - 1):+.1f}%"


def main() -> int:
    """Print the table; return 1 where a figure is too far from the published one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--directory", type=Path, help="where the files stay; by default they are removed")
    options = parser.parse_args()
    print(f"{platform.machine()}, {platform.processor() or platform.system()}, Python {platform.python_version()}")
    heading = ("build s", "read s", "again s", "MiB", "ops", "Mparam", "off", "GFLOP", "off")
    print(f"{'network':20}" + "".join(f"{word:>10}" for word in heading))
    wrong = []
    for name in options.names:
        with tempfile.TemporaryDirectory() as temporary:
            found = measure(name, options.directory or Path(temporary))
        parameters, products = PUBLISHED.get(name, (None, None))
        flops = 2 * products if products else None
        millions = found["parameters"] / 1e6
        offs = (_off(millions, parameters), _off(found["gflop"], flops))
        print(
            f"{name:20}{found['build_s']:10.2f}{found['read_s']:10.3f}{found['again_s']:10.3f}"
            f"{found['size_mib']:10.1f}{found['ops']:10.0f}{millions:10.2f}{offs[0]:>10}"
            f"{found['gflop']:10.3f}{offs[1]:>10}",
            flush=True,
        )
        listed = find_architecture(name).parameters
        if found["parameters"] != listed:
            print(f"  {name} has {found['parameters']:,.0f} parameters but is listed with {listed:,}")
            wrong.append(name)
        wrong += [off for off in offs if off != "–" and abs(float(off[:-1])) > ALLOWED_PCT]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
