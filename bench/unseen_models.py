"""Whole models that others measured, and what is estimated for them on GPUs that were left out."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from math import log
from pathlib import Path

from bench import ledger
from bench.normalised_networks import write_unfolded
from bench.op_training import chip_of
from bench.roofline import PUBLISHED_AS
from bench.v100_profiles import v100_profiles
from gpuprof.domain.catalogue import datasets, device
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuModel, TimeParts, generation_of, kind_of, shipped_model
from gpuprof.estimators.cross_gpu.features import rates_of
from gpuprof.estimators.cross_gpu.kernels import KernelList, KernelsByBatch, LaunchMode, list_kernels
from gpuprof.graph.load import load_graph
from gpuprof.zoo.architecture import ARCHITECTURES, find_architecture
from gpuprof.zoo.build import build

LAYERS = {"bert_large": 24, "gpt2_large": 36, "opt_13": 24, "gpt3_xl": 24, "gpt3_27": 32}
_OTHERS = {"NeuSight": "neusight_ms", "roofline": "roofline_ms", "Habitat": "habitat_ms", "Li": "li_et_al_ms"}
_PARVAGPU_NAMES = {"bert": "bert_base", "inceptionv3": "inception_v3", "mobilenetv2": "mobilenet_v2"}
#: Published with inputs of sizes that are not said, or not those of the zoo.
_NOT_ALIKE = frozenset({"bert_base", "gpt2", "efficientnet_b7"})
_PROFILES = {1: "1g.10gb", 2: "2g.20gb", 3: "3g.40gb", 4: "4g.40gb", 7: "7g.80gb"}


@dataclass(frozen=True, slots=True)
class ModelDeviation:
    """One measured model and its estimate.

    Attributes
    ----------
    source, device, model, runtime, kind : str
        Who measured it, with what runtime and perhaps precision; ``kind`` as `cross_gpu.kind_of` has it.
    batch : int
    measured_ms : float
    parts : TimeParts
        Of the estimate.
    others : mapping of str to float
        What published predictors say, in ms.
    """

    source: str
    device: str
    model: str
    runtime: str
    kind: str
    batch: int
    measured_ms: float
    parts: TimeParts
    others: Mapping[str, float] = field(default_factory=dict)

    @property
    def predicted_ms(self) -> float:
        """What is estimated."""
        return 1e3 * self.parts.total_s

    @property
    def log_error(self) -> float:
        """Logarithm of measured over predicted."""
        return log(self.measured_ms / self.predicted_ms)

    @property
    def by_host(self) -> bool:
        """Whether the host takes longer than the kernels."""
        return self.parts.host_s > self.parts.kernels_s

    @property
    def generation(self) -> str:
        """What `intervals.generation_of` says of the GPU."""
        return generation_of(device(self.device))

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ms / self.measured_ms - 1.0


def transformer_errors(exports: Path, left_out: Mapping[str, CrossGpuModel]) -> list[ModelDeviation]:
    """Return NeuSight's transformers whose exports are there."""

    @cache
    def kernels(name: str, layers: int, batch: int, runtime: LaunchMode) -> KernelList:
        return list_kernels(load_graph(exports / f"{name}-{layers}.onnx", batch), "float32", runtime)

    deviations = []
    for row in csv.DictReader((datasets() / "neusight" / "models.csv").read_text(encoding="utf-8").splitlines()):
        name, batch = row["model"], int(row["batch"])
        if name not in LAYERS or not (exports / f"{name}-2.onnx").is_file():
            continue
        runtime = LaunchMode.FUSED if row["fused"] == "True" else LaunchMode.EAGER
        model, rates = _model(left_out, row["device"]), rates_of(device(row["device"]), "float32")
        one_layer, two = (model.time_parts(kernels(name, n, batch, runtime), rates, runtime) for n in (1, 2))
        predictions = {predictor: float(row[column]) for predictor, column in _OTHERS.items() if row[column]}
        measured = float(row["latency_ms"])
        kind = kind_of(kernels(name, 2, batch, runtime), "float32")
        label = (row["device"], name, str(runtime), kind)
        deviations.append(
            ModelDeviation("NeuSight", *label, batch, measured, _deepen(one_layer, two, LAYERS[name]), predictions)
        )
    return deviations


def _deepen(one_layer: TimeParts, two: TimeParts, layers: int) -> TimeParts:
    """Return the parts of so many layers from those of one and of two."""

    def extend(of_one: float, of_two: float) -> float:
        return of_one + (layers - 1) * (of_two - of_one)

    by_kind = {kind: extend(one_layer.by_kind.get(kind, 0.0), part) for kind, part in two.by_kind.items()}
    return TimeParts(extend(one_layer.kernels_s, two.kernels_s), extend(one_layer.host_s, two.host_s), by_kind)


def convolutional_errors(
    left_out: Mapping[str, CrossGpuModel], folder: Path, reference: Path | None
) -> list[ModelDeviation]:
    """Return the networks of the thesis's V100 table, and of ParvaGPU's and iGniter's where they are given."""
    models: dict[tuple[str, str, LaunchMode], KernelsByBatch] = {}
    deviations = []
    for source, gpu, name, batch, share, runtime, precision, measured in _published_rows(reference):
        if name not in ARCHITECTURES or name in _NOT_ALIKE:
            continue
        key = (name, precision, runtime)
        if key not in models:
            path = folder / f"{name}.onnx"
            if not path.is_file():
                build(find_architecture(name), folder / f"{name}-zoo.onnx")
                write_unfolded(name, folder / f"{name}-zoo.onnx", path)
            models[key] = KernelsByBatch(partial(load_graph, path), precision, runtime)
        rates = rates_of(device(gpu), precision, share)
        parts = _model(left_out, gpu).time_parts(models[key].at(batch), rates, runtime)
        kind = kind_of(models[key].at(batch), precision)
        label = name if share == Share() else f"{name} {share}"
        deviations.append(ModelDeviation(source, gpu, label, str(runtime), kind, batch, measured, parts))
    return deviations


def ledger_errors(left_out: Mapping[str, CrossGpuModel], folder: Path) -> Iterator[ModelDeviation]:
    """Yield the ledger's networks; on GPUs without published ops as the shipped regressors estimate them.

    `transformer_errors` and `convolutional_errors` judge two of its sources by all their networks.
    """
    entries = filter(ledger.is_estimated, ledger.read_measurements())
    for entry in (entry for entry in entries if entry.source not in ("neusight", "thesis")):
        kernels, runtime = ledger.list_kernels(entry, folder), LaunchMode(entry.runtime)
        model = _model(left_out, entry.device) if _key(entry.device) in left_out else shipped_model()
        parts = model.time_parts(kernels, rates_of(ledger.find_board(entry), entry.precision), runtime)
        way = f"{entry.runtime} {entry.precision}"
        label = (entry.source, entry.device, entry.model, way, kind_of(kernels, entry.precision))
        yield ModelDeviation(*label, int(entry.batch), ledger.find_latency_ms(entry), parts)


def _model(left_out: Mapping[str, CrossGpuModel], gpu: str) -> CrossGpuModel:
    return left_out[_key(gpu)]


def _key(gpu: str) -> str:
    chip = chip_of(gpu)
    return {"v100": "v100-pcie-32"}.get(chip, chip)


_Row = tuple[str, str, str, int, Share, LaunchMode, str, float]


def _published_rows(reference: Path | None) -> Iterator[_Row]:
    for row in v100_profiles().rows:
        if row.throughput_rps:
            name, measured = PUBLISHED_AS.get(row.model, row.model), 1000.0 * row.batch / row.throughput_rps
            yield "thesis", "v100", name, row.batch, Share(), LaunchMode.EAGER, "float32", measured
    if reference is None:
        return
    for line in _lines(reference / "igniter_v100" / "solo.csv"):
        share, latency = Share(float(line["mps_share_pct"])), float(line["latency_ms"])
        yield "iGniter", "v100", line["model"], int(line["batch"]), share, LaunchMode.FUSED, "float32", latency
    for path in sorted((reference / "parvagpu_a100").glob("*.csv")):
        if path.stem.startswith("SLO"):
            continue
        for line in _lines(path):
            batch, rate = int(line["Batch size"]), float(line["Throughput"])
            if line["Workload Number"] == "1" and rate > 0.0:
                size = int(line["Mig instance"])
                share = Share(100.0, _PROFILES[size])
                name = _PARVAGPU_NAMES.get(path.stem, path.stem)
                yield "ParvaGPU", "a100-80", name, batch, share, LaunchMode.EAGER, "tfloat32", 1000.0 * batch / rate


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
