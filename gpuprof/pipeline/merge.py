"""Similarity of models' weights, and their merger into one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpuprof.errors import InfeasibleError, InputError
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.devices import open_database, resolve_device
from gpuprof.pipeline.result import Progress, ProgressCallback, Result, say_nothing
from gpuprof.pipeline.settings import Dims, Settings, option

if TYPE_CHECKING:
    from gpuprof.merging.pipeline import MergeReport
    from gpuprof.merging.similarity import ModelSimilarity


@dataclass(frozen=True, slots=True)
class MergedFile:
    """A merged graph on disk, and the models in it."""

    path: Path
    report: MergeReport

    def row(self) -> dict[str, object]:
        """Return totals over the graph's operators, each group of operators, and the difference of each output."""
        report, proof = self.report, self.report.proof
        return {
            "file": str(self.path),
            "models": list(report.models),
            "operators_merged": sum(len(row.operators) for row in report.merged),
            "operators_sharing": sum(len(row.operators) for row in report.shared),
            "operators": sum(len(row.operators) for row in report.operators),
            "other_ops_merged": report.other_ops_merged,
            "weight_bytes_before": report.weight_bytes_before,
            "weight_bytes_after": report.weight_bytes_after,
            "predicted_gain_us": 1e6 * report.gain_s,
            "largest_difference": proof.worst.relative if proof and proof.worst else None,
            "report": [asdict(row) for row in report.operators],
            "outputs": [asdict(difference) for difference in proof.differences] if proof else [],
            "calls": list(proof.calls) if proof else [],
        }


@dataclass(frozen=True, kw_only=True)
class MergeResult(Result):
    """The merged graphs; the notes list unmerged models, with the reason."""

    files: tuple[MergedFile, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each merged graph."""
        return [file.row() for file in self.files]


def merge(
    models: Sequence[PathArgument],
    output: PathArgument,
    *,
    settings: MergeSettings | None = None,
    device: str | None = "cpu",
) -> MergeResult:
    """Merge models that share weights into one graph, prove equal outputs, and write it (USHER §3.4).

    Raises `InputError` when a file cannot be read, would be overwritten, or a size names no model; `InfeasibleError`
    when there is nothing to merge; nothing is written.

    Parameters
    ----------
    models : sequence of path
        Two or more ONNX files.
    output : path
        File to write; a second group of mergeable models goes to ``NAME-2.onnx``, and so on.
    device : str, optional
        Device for the predicted gain.

    Examples
    --------
    >>> import gpuprof
    >>> files = [gpuprof.build_model("random_mlp", f"{name}.onnx") for name in ("one", "other")]
    >>> merged = gpuprof.merge(files, "both.onnx", settings=gpuprof.MergeSettings(force=True))
    >>> row = merged.rows()[0]
    >>> row["models"], row["weight_bytes_after"] < row["weight_bytes_before"]
    (['one', 'other'], True)
    """
    from gpuprof.merging.gain import device_rates
    from gpuprof.merging.pipeline import MergeOptions, propose_merges

    paths, target = [Path(model) for model in models], Path(output)
    if len(paths) < 2:
        raise InputError("merging takes at least two models but got one", "gpuprof merge A.onnx B.onnx -o merged.onnx")
    chosen = settings or MergeSettings()
    target_device = resolve_device(device, open_database(None, needed=False))
    options = MergeOptions(
        omega=chosen.omega,
        force=chosen.force,
        dims=dict(chosen.dims or {}),
        batches=dict(chosen.batches or {}),
        rates=device_rates(target_device),
    )
    if any(target.resolve() == model.resolve() for model in paths):
        raise InputError(f"{target} is one of the models to merge", "write to another file")
    proposals = propose_merges(paths, options)
    names = {name for p in proposals.merges for name in p.report.models} | {name for name, _ in proposals.left_out}
    for name in options.batches:
        if name not in names:
            raise InputError(f"--batch names {name!r}, which is no model here", f"they are {', '.join(sorted(names))}")
    notes = tuple(f"{name} is not merged: {reason}" for name, reason in proposals.left_out)
    if not proposals.merges:
        # The reason is recognised by the wording of `gpuprof.merging.pipeline`: force overrides this reason alone.
        is_costly = any("predicted to cost" in reason for _, reason in proposals.left_out)
        fix = "--force merges it nevertheless" if is_costly else ""
        raise InfeasibleError("; ".join(["nothing to merge, so nothing is written", *notes]), fix)
    files = []
    for number, proposal in enumerate(proposals.merges, start=1):
        path = target if number == 1 else target.with_stem(f"{target.stem}-{number}")
        files.append(MergedFile(path, proposal.write(path)))
    return MergeResult(notes=notes, files=tuple(files))


_SIZES = "Dimensions and batches"


class MergeSettings(Settings):
    """Similarity of operators, and the models' input sizes."""

    title: ClassVar[str] = "Similarity"

    omega: float = option(0.4, "Minimum similarity of operators to merge.")
    dims: Dims | None = option(
        None, "Size of a free dimension: NAME=SIZE; may be repeated.", "--dim", repeated=True, panel=_SIZES
    )
    batches: Dims | None = option(
        None, "Batch that a model will run at: NAME=SIZE; may be repeated.", "--batch", repeated=True, panel=_SIZES
    )
    force: bool = option(False, "Also merge operators where this is predicted to cost time.")


@dataclass(frozen=True, kw_only=True)
class SimilarityResult(Result):
    """The similarity of the weights of each pair of models."""

    pairs: tuple[ModelSimilarity, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each pair of models."""
        return [
            {
                "first": pair.first,
                "second": pair.second,
                "layers": len(pair.layers),
                "all_pairs": pair.all_pairs,
                "matched": pair.matched,
                "exact": pair.exact,
            }
            for pair in self.pairs
        ]


def similarity(models: Sequence[PathArgument], *, progress: ProgressCallback = say_nothing) -> SimilarityResult:
    """Compare the weights of models layer by layer: the longest common submatrix of each pair (USHER §2.4).

    Raises `InputError` for fewer than two models, or a file that cannot be read.

    Parameters
    ----------
    models : sequence of path
        Two or more ONNX files.

    Examples
    --------
    >>> import gpuprof
    >>> files = [gpuprof.build_model("random_mlp", f"{name}.onnx") for name in ("one", "other")]
    >>> gpuprof.similarity(files).to_frame()["matched"].tolist()
    [1.0]
    """
    from gpuprof.merging.pipeline import read_weights
    from gpuprof.merging.similarity import compare_models

    if len(models) < 2:
        raise InputError("similarity takes at least two models but got one", "gpuprof similarity A.onnx B.onnx")
    sources = read_weights([Path(model) for model in models])
    index_pairs = list(combinations(range(len(sources)), 2))
    pairs: list[ModelSimilarity] = []
    progress(Progress("comparing", 0, len(index_pairs)))
    for i, j in index_pairs:
        pairs.append(compare_models(sources[i], sources[j]))
        progress(Progress("comparing", len(pairs), len(index_pairs)))
    return SimilarityResult(pairs=tuple(pairs))
