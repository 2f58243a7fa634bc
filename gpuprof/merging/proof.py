"""Runs the original models and the merged model on random inputs and compares their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import NodeProto

from gpuprof.errors import InputError, runtime_errors
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.graph.merged_model import MergedMember, MergedModel
from gpuprof.merging.source import Array, SourceModel
from gpuprof.runtime.session import open_session

if TYPE_CHECKING:
    import onnxruntime

#: Largest difference allowed, relative to the largest value of the output. Half precision keeps 11 bits, bfloat16 8.
TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of an output of the merged model from the original's."""

    model: str
    output: str
    dtype: str
    #: Largest difference divided by the largest absolute value of the original output; for integers the fraction of
    #: differing entries. Infinite if only one of the outputs has NaN.
    relative: float
    tolerance: float
    call: str  #: Models and batches of the call with the largest difference.

    @property
    def is_within(self) -> bool:
        """Whether the difference is tolerated."""
        return self.relative <= self.tolerance


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of the comparison."""

    differences: tuple[Difference, ...]  #: Largest difference of each output.
    calls: tuple[str, ...]  #: Models and batches of each call.
    #: Number of rows (0 or 1) that stand for an absent model, by model.
    absent_rows: dict[str, int]

    @property
    def worst(self) -> Difference | None:
        """Largest difference, of those beyond their tolerance if there are any."""
        return max(self.differences, key=lambda d: (not d.is_within, d.relative), default=None)


def relative_difference(original: Array, merged: Array) -> float:
    """Return the relative difference of ``merged`` from ``original``; see `Difference`."""
    if original.shape != merged.shape or original.dtype != merged.dtype:
        return float("inf")
    if original.size == 0:
        return 0.0
    if original.dtype.kind not in "fV":
        return float(np.mean(original != merged))
    a, b = original.astype(np.float64), merged.astype(np.float64)
    with np.errstate(invalid="ignore"):
        distances = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    largest = float(np.nan_to_num(distances, nan=np.inf, posinf=np.inf).max())
    return largest / (float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) or 1.0)


def prove_same(sources: Sequence[SourceModel], merged: Path, described: MergedModel) -> Proof:
    """Run the originals and the merged file on random inputs and return the differences.

    The calls: all models at different batches, with inputs of standard deviation 1 and 30; then each model absent, with
    a row of zeros in its place if an empty batch fails. Raises `InputError` when a model cannot be run at all.
    """
    prover = _Prover(sources, merged, described)
    # Batches differ between models, because equal batches would hide an exchange of two models' rows.
    for seed in (0, 1):
        prover.compare([1 + (i + seed) % 3 for i in range(len(sources))], seed)
    absent = {}
    for i, source in enumerate(sources):
        batches = [None if model == i else 2 for model in range(len(sources))]
        absent[source.name] = prover.compare_without(batches) if len(sources) > 1 else 0
    return Proof(tuple(prover.worst.values()), tuple(prover.calls), absent)


class _Prover:
    def __init__(self, sources: Sequence[SourceModel], merged: Path, described: MergedModel) -> None:
        self._sources, self._path, self._described = sources, merged, described
        self._session = open_session(merged, threads=1)
        self._answers: dict[tuple[int, int, int], tuple[dict[str, Array], dict[str, Array]]] = {}
        self.worst: dict[tuple[str, str], Difference] = {}
        self.calls: list[str] = []

    def compare(self, batches: Sequence[int | None], seed: int, absent_rows: int = 0) -> None:
        """Run a call of the merged model, with models of batch None absent, and compare with the originals."""
        members = [replace(member, absent_rows=absent_rows) for member in self._described.members]
        described, call = MergedModel(tuple(members)), []
        inputs, expected = dict[str, dict[str, Array]](), dict[str, dict[str, Array]]()
        for i, (member, batch) in enumerate(zip(members, batches, strict=True)):
            call.append(f"{member.name} {'absent' if batch is None else f'× {batch}'}")
            if batch is not None:
                inputs[member.name], expected[member.name] = self._run_original(i, batch, seed)
        names = [name for present in expected for name in described.output_names(present)]
        results = _run(self._session, described.feeds(inputs), self._path, names)
        self.calls.append(", ".join(call))
        for member in members:
            if member.name in expected:
                self._note(member, expected[member.name], described.answers(results, member.name))

    def compare_without(self, batches: Sequence[int | None]) -> int:
        """Compare a call with a model absent; return the number of rows in its place."""
        # An empty batch ends the process in some ops, so it is not tried with them.
        if not any(_may_crash(source.nodes) for source in self._sources):
            try:
                self.compare(batches, 0)
                return 0
            except InputError:  # an op of the merged model cannot take an empty batch
                pass
        self.compare(batches, 0, absent_rows=1)
        return 1

    def _run_original(self, model: int, batch: int, seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return (inputs, outputs) of an original by name; a single session at a time, to save memory."""
        key = (model, batch, seed)
        if key not in self._answers:
            source = self._sources[model]
            inputs = random_inputs(load_graph(source.path, batch, source.name, source.dims), 1000 * model + seed)
            inputs = {name: _with_gaps(name, _enlarge(value, seed), seed) for name, value in inputs.items()}
            session = open_session(source.path, threads=1)
            self._answers[key] = inputs, _run(session, inputs, source.path, list(source.outputs))
        return self._answers[key]

    def _note(self, member: MergedMember, expected: dict[str, Array], answers: dict[str, Array]) -> None:
        for value in member.outputs:
            tolerance = TOLERANCES.get(value.dtype, 0.0)
            relative = relative_difference(expected[value.name], answers[value.name])
            difference = Difference(member.name, value.name, value.dtype, relative, tolerance, self.calls[-1])
            key = (member.name, value.name)
            if key not in self.worst or not self.worst[key].relative >= relative:
                self.worst[key] = difference


def _may_crash(nodes: Sequence[NodeProto]) -> bool:
    """Return whether an empty batch may end the process: recurrent ops, ops outside ONNX's domain, nested graphs."""
    return any(
        node.op_type in ("LSTM", "GRU", "RNN") or node.domain or any(item.HasField("g") for item in node.attribute)
        for node in nodes
    )


def _enlarge(value: Array, seed: int) -> Array:
    """Return the floats of the second call 30 times as large; integers are counts or indices.

    Large inputs expose the error of weights treated as equal in models that amplify.
    """
    return np.multiply(value, np.asarray(30.0, value.dtype)) if seed and value.dtype.kind in "fV" else value


def _with_gaps(name: str, value: Array, seed: int) -> Array:
    """Mask the end of every second row, because an exchange of two masks of ones would go unnoticed."""
    if "mask" not in name.lower() or value.ndim != 2 or seed % 2 == 0 or value.shape[1] < 4:
        return value
    masked = value.copy()
    masked[::2, -(value.shape[1] // 4) :] = 0
    return masked


def _run(
    session: onnxruntime.InferenceSession, feeds: dict[str, Array], path: Path, names: list[str]
) -> dict[str, Array]:
    import onnxruntime as ort

    options = ort.RunOptions()
    options.log_severity_level = 4  # empty batches are tried on purpose
    try:
        return dict(zip(names, session.run(names, feeds, options), strict=True))
    except runtime_errors() as error:
        raise InputError(f"{path} cannot be run: {' '.join(str(error).split())[:300]}") from error
