"""Runs the original models and the merged model on random inputs and compares their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpuprof.errors import InputError, runtime_errors
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.graph.merged_model import MergedModel
from gpuprof.merging.empty_call import can_run, is_risky
from gpuprof.merging.source import Array, SourceModel
from gpuprof.runtime.session import open_session

if TYPE_CHECKING:
    import onnxruntime

#: Largest difference allowed, relative to the largest value of the output. Half precision keeps 11 bits, bfloat16 8.
TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
_SEEDS = (0, 1)
#: Factors on the inputs of the first and second call: large inputs expose the error of weights treated as equal in
#: models that amplify.
_SCALES = (1.0, 30.0)


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
    #: Number of rows (0 or 1) that stand for an absent model, by model with a free batch.
    absent_rows: dict[str, int]
    #: Models that need a row in the merged graph but accept an empty batch by themselves.
    needless_rows: tuple[str, ...] = ()

    @property
    def worst(self) -> Difference | None:
        """Difference with the largest ratio to its tolerance."""
        return max(self.differences, key=lambda d: (not d.is_within, d.relative / d.tolerance), default=None)


def relative_difference(original: Array, merged: Array) -> float:
    """Return the relative difference of ``merged`` from ``original``; see `Difference`."""
    if original.shape != merged.shape or original.dtype != merged.dtype:
        return float("inf")
    if original.size == 0:
        return 0.0
    if original.dtype.kind not in "fV":
        return float(np.mean(original != merged))
    a, b = original.astype(np.float64), merged.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)) or not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite & ~np.isnan(a)], b[~finite & ~np.isnan(b)]):
        return float("inf")
    scale = float(np.abs(a[finite]).max(initial=0.0))
    apart = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    return apart / scale if scale else apart


def prove_same(
    sources: Sequence[SourceModel],
    merged: Path,
    described: MergedModel,
    dims: Mapping[str, int] | None = None,
    tolerance: float | None = None,
    threads: int = 1,
) -> Proof:
    """Run the originals and the merged file on random inputs and return the differences.

    The calls: all models at different batches, with inputs of standard deviation 1 and 30; then each model absent, with
    a row of zeros in its place if an empty batch fails. Raises `InputError` when a model cannot be run at all.
    ``dims``: sizes of free dimensions other than the batch, as when the models were read; ``tolerance``: of every
    output; by default `TOLERANCES` by type.
    """
    originals = _Originals(sources, dims or {}, threads)
    prover = _Prover(originals, merged, described, tolerance, threads)
    # Batches differ between models, because equal batches would hide an exchange of two models' rows.
    present = [_batch(source, 1 + i % 3) for i, source in enumerate(sources)]
    other = [_batch(source, 3 - i % 3) for i, source in enumerate(sources)]
    for seed, batches in zip(_SEEDS, (present, other), strict=True):
        prover.compare(list(batches), seed)
    absent = {}
    for i, source in enumerate(sources):
        if source.batch_input is not None and len(sources) > 1:
            absent[source.name] = prover.without(i, [_batch(s, 2) for s in sources])
    kept = [i for i, source in enumerate(sources) if absent.get(source.name)]
    needless = tuple(sources[i].name for i in kept if originals.takes_nothing(i, described))
    return Proof(tuple(prover.worst.values()), tuple(prover.calls), absent, needless)


def _batch(source: SourceModel, wanted: int) -> int:
    return wanted if source.batch_input is not None else source.fixed_batch


class _Originals:
    """The original models, in a single session at a time because all together may not fit into memory."""

    def __init__(self, sources: Sequence[SourceModel], dims: Mapping[str, int], threads: int) -> None:
        self.sources, self._dims, self._threads = sources, dims, threads
        self._answers: dict[tuple[int, int, int], tuple[dict[str, Array], dict[str, Array]]] = {}

    def run(self, model: int, batch: int, seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return (inputs, outputs) of a model by name."""
        key = (model, batch, seed)
        if key not in self._answers:
            source = self.sources[model]
            free = {d: s for d, s in self._dims.items() if _has_dim(source.path, d)}
            fed = random_inputs(load_graph(source.path, batch, source.name, free), 1000 * model + seed)
            scale = _SCALES[seed]
            fed = {name: _with_gaps(name, _enlarge(value, scale), seed) for name, value in fed.items()}
            session = open_session(source.path, threads=self._threads)
            self._answers[key] = fed, _run(session, fed, source.path, list(source.outputs))
        return self._answers[key]

    def takes_nothing(self, model: int, described: MergedModel) -> bool:
        """Return whether a model can be run with an empty batch."""
        source, member = self.sources[model], described.members[model]
        empty = replace(member, absent_rows=0).nothing()
        fed = {value.name: empty[value.merged] for value in member.inputs}
        if is_risky(source.nodes):
            return can_run(source.path, fed, self._threads)
        try:
            _run(open_session(source.path, threads=self._threads), fed, source.path, list(source.outputs))
        except InputError:
            return False
        return True


def _has_dim(path: Path, dim: str) -> bool:
    from gpuprof.graph.dims import declared_dims
    from gpuprof.graph.file import read_onnx

    for info in read_onnx(path).model.graph.input:
        shape = declared_dims(info) or ()
        if dim in shape or any(dim == f"{info.name}:{axis}" for axis, size in enumerate(shape) if size is None):
            return True
    return False


def _enlarge(value: Array, scale: float) -> Array:
    """Return floats multiplied by ``scale``; integers unchanged, since they are counts or indices."""
    return np.multiply(value, np.asarray(scale, value.dtype)) if value.dtype.kind in "fV" else value


def _with_gaps(name: str, value: Array, seed: int) -> Array:
    """Mask the end of every second row, because an exchange of two masks of ones would go unnoticed."""
    if "mask" not in name.lower() or value.ndim != 2 or seed % 2 == 0 or value.shape[1] < 4:
        return value
    masked = value.copy()
    masked[::2, -(value.shape[1] // 4) :] = 0
    return masked


def _run(
    session: onnxruntime.InferenceSession, fed: dict[str, Array], path: Path, names: list[str]
) -> dict[str, Array]:
    try:
        # Empty batches are tried on purpose, so the runtime's log of refused batches is silenced.
        return dict(zip(names, session.run(names, fed, _quiet()), strict=True))
    except runtime_errors() as error:
        raise InputError(f"{path} cannot be run: {' '.join(str(error).split())[:300]}") from error


def _quiet() -> onnxruntime.RunOptions:
    import onnxruntime as ort

    options = ort.RunOptions()
    options.log_severity_level = 4
    return options


class _Prover:
    def __init__(
        self, originals: _Originals, merged: Path, described: MergedModel, tolerance: float | None, threads: int
    ) -> None:
        self._originals, self._path, self._described = originals, merged, described
        self._tolerance = tolerance
        self._threads = threads
        self._session = open_session(merged, threads=threads)
        self._risky = any(is_risky(source.nodes) for source in originals.sources)
        self.worst: dict[tuple[str, str], Difference] = {}
        self.calls: list[str] = []

    def compare(self, batches: Sequence[int | None], seed: int, rows: int = 0) -> None:
        """Run a call of the merged model, with models of batch None absent, and compare with the originals."""
        fed, expected = self._feed_call(batches, seed)
        for i, batch in enumerate(batches):
            if batch is None and rows:
                fed |= replace(self._described.members[i], absent_rows=rows).nothing()
        present = list(expected)
        call = ", ".join(
            f"{member.name} {'absent' if batch is None else f'× {batch}'}"
            for member, batch in zip(self._described.members, batches, strict=True)
        )
        names = [name for i in present for name in self._described.output_names(self._described.members[i].name)]
        results = _run(self._session, fed, self._path, names)
        self.calls.append(call)
        for i in present:
            self._note(i, expected[i], results, call)

    def _feed_call(
        self, batches: Sequence[int | None], seed: int
    ) -> tuple[dict[str, Array], dict[int, dict[str, Array]]]:
        """Return the inputs of a call, and each present model's outputs when run alone."""
        answers = {i: self._originals.run(i, batch, seed) for i, batch in enumerate(batches) if batch is not None}
        requests = {self._described.members[i].name: given for i, (given, _) in answers.items()}
        return self._described.feeds(requests), {i: expected for i, (_, expected) in answers.items()}

    def without(self, absent: int, batches: Sequence[int]) -> int:
        """Compare a call with a model absent; return the number of rows in its place."""
        given: list[int | None] = list(batches)
        given[absent] = None
        if self._risky and not can_run(self._path, self._feed_call(given, 0)[0], self._threads):
            self.compare(given, 0, rows=1)
            return 1
        try:
            self.compare(given, 0)
            return 0
        except InputError:
            self.compare(given, 0, rows=1)
            return 1

    def _note(self, i: int, expected: dict[str, Array], results: dict[str, Array], call: str) -> None:
        member = self._described.members[i]
        answers = self._described.answers(results, member.name)
        for value in member.outputs:
            tolerance = TOLERANCES.get(value.dtype, 0.0) if self._tolerance is None else self._tolerance
            apart = relative_difference(expected[value.name], answers[value.name])
            difference = Difference(member.name, value.name, value.dtype, apart, tolerance, call)
            key = (member.name, value.name)
            if key not in self.worst or not self.worst[key].relative >= apart:
                self.worst[key] = difference
