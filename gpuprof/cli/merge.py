"""``gpuprof merge``: several models that share weights become one graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.merge_options import DimensionSizes, GainOptions, MergeOutput, SimilarityThresholds
from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import Column, CsvOption, Format, JsonOption, chosen_format, mebibytes, number, print_rows, say
from gpuprof.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from gpuprof.merging.pipeline import MergeOptions
    from gpuprof.merging.proposal import Proposals
    from gpuprof.merging.report import MergeReport

_SUMMARY = (
    Column("file", "file", right=False),
    Column("models", "models", lambda value: ", ".join(value) if isinstance(value, list) else str(value), right=False),
    Column("operators_merged", "operators merged"),
    Column("operators_sharing", "sharing weights"),
    Column("operators", "of"),
    Column("other_ops_merged", "other ops"),
    Column("weight_bytes_before", "weights MiB", mebibytes),
    Column("weight_bytes_after", "merged MiB", mebibytes),
    Column("predicted_gain_us", "predicted gain µs", number()),
    Column("largest_difference", "largest difference", number()),
)
_OPERATORS = (
    Column("how", "how", right=False),
    Column("op_type", "type", right=False),
    Column("operators", "operators", lambda v: " + ".join(v) if isinstance(v, list) else str(v), right=False),
    Column("similarity", "similarity", number()),
    Column("weight_bytes", "weights MiB", mebibytes),
    Column("saved_bytes", "saved MiB", mebibytes),
    Column("reason", "why not", right=False),
)
_DIFFERENCES = (
    Column("model", "model", right=False),
    Column("output", "output", right=False),
    Column("dtype", "type", right=False),
    Column("relative", "difference", number()),
    Column("tolerance", "tolerated", number()),
    Column("call", "in the call", right=False),
)


@with_groups
def merge(
    models: Annotated[list[Path], typer.Argument(help="Two or more ONNX files.")],
    result: MergeOutput,
    likeness: SimilarityThresholds,
    sizes: DimensionSizes,
    gain: GainOptions,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Merge models that share weights into one graph, prove that it gives the same, and write it."""
    from gpuprof.merging.proposal import propose_merges

    chosen = chosen_format(as_json, as_csv)
    if len(models) < 2:
        raise InputError("merging takes at least two models but got one", "gpuprof merge A.onnx B.onnx -o merged.onnx")
    options = gain.options(models, likeness, sizes)
    result.check(models)
    proposals = propose_merges(models, options)
    _check_names(options, models, proposals)
    for name, reason in proposals.left_out:
        say(f"{name} is not merged: {reason}")
    if not proposals.merges:
        raise InfeasibleError("nothing to merge, so nothing is written", _advice(proposals))
    paths = result.paths(len(proposals.merges))
    written = [(path, proposal.write(path)) for path, proposal in zip(paths, proposals.merges, strict=True)]
    _print(written, chosen, result.report)


def _print(written: Sequence[tuple[Path, MergeReport]], chosen: Format, report: bool) -> None:
    """Print what was merged into which file and, if ``report``, every operator and every output."""
    rows = [_summary(path, result, full=report and chosen is Format.JSON) for path, result in written]
    if report and chosen is not Format.JSON:
        for path, result in written:
            print_rows(_operator_rows(result), _OPERATORS, chosen, f"operators of {path}")
            if chosen is Format.TABLE:
                print_rows(_difference_rows(result), _DIFFERENCES, chosen, f"outputs of {path}")
        if chosen is Format.CSV:
            return
    print_rows(rows, _SUMMARY, chosen)


def _check_names(options: MergeOptions, models: list[Path], proposals: Proposals) -> None:
    known = {name for p in proposals.merges for name in p.models} | {name for name, _ in proposals.left_out}
    for name in options.batches:
        if name not in known:
            raise InputError(f"--batch names {name!r}, which is no model here", f"they are {', '.join(sorted(known))}")


def _advice(proposals: Proposals) -> str:
    reasons = {reason for _, reason in proposals.left_out}
    return "--force merges it nevertheless" if any("predicted to cost" in reason for reason in reasons) else ""


def _summary(path: Path, result: MergeReport, full: bool) -> dict[str, object]:
    worst = result.proof.worst if result.proof else None
    row: dict[str, object] = {
        "file": str(path),
        "models": list(result.models),
        "operators_merged": sum(len(row.operators) for row in result.merged),
        "operators_sharing": sum(len(row.operators) for row in result.shared),
        "operators": sum(len(row.operators) for row in result.operators),
        "other_ops_merged": result.other_ops_merged,
        "weight_bytes_before": result.weight_bytes_before,
        "weight_bytes_after": result.weight_bytes_after,
        "predicted_gain_us": 1e6 * result.gain_s,
        "largest_difference": worst.relative if worst else None,
    }
    if full:
        row |= {"report": _operator_rows(result), "outputs": _difference_rows(result)}
        row["calls"] = list(result.proof.calls) if result.proof else []
    return row


def _operator_rows(result: MergeReport) -> list[dict[str, object]]:
    from dataclasses import asdict

    return [asdict(row) | {"models": list(row.models), "operators": list(row.operators)} for row in result.operators]


def _difference_rows(result: MergeReport) -> list[dict[str, object]]:
    from dataclasses import asdict

    return [asdict(one) for one in result.proof.differences] if result.proof else []
