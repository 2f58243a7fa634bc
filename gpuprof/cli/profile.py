"""``gpuprof profile``: measure models and keep what was measured in the kernel database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuprof.cli.cluster_sweep import sweep_cluster
from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import (
    Column,
    CsvOption,
    Format,
    JsonOption,
    chosen_format,
    mebibytes,
    number,
    print_rows,
    progress,
    say,
    say_note,
)
from gpuprof.cli.profile_options import ClusterOptions, MeasurementOptions, OtherMeasurements, WorkloadOptions
from gpuprof.cli.reports import ingest_reports, print_ingested
from gpuprof.errors import InputError, UnavailableError, UnstableError
from gpuprof.pipeline.devices import resolve_local_device
from gpuprof.pipeline.serving_cost import measure_serving

if TYPE_CHECKING:
    from gpuprof.profiling.per_op.per_op import OpOutcome, PerOp
    from gpuprof.profiling.sweep.campaign import Campaign, Cell, CellResult
    from gpuprof.profiling.sweep.planning import NamedModel

_COLUMNS = (
    Column("model", "model", right=False),
    Column("batch", "batch"),
    Column("share", "share"),
    Column("processes", "processes"),
    Column("latency_p50_ms", "p50 ms", number()),
    Column("latency_p99_ms", "p99 ms", number()),
    Column("throughput_rps", "requests/s", number()),
    Column("memory_peak_bytes", "memory MiB", mebibytes),
    Column("beside", "beside", right=False),
    Column("stable", "stable", lambda stable: "yes" if stable else "no", right=False),
)
_OP_COLUMNS = (
    Column("op_type", "op", right=False),
    Column("share", "share"),
    Column("ops", "distinct"),
    Column("new", "measured now"),
    Column("untimed", "without a time"),
    Column("sum_ms", "sum of times ms", number()),
)


@with_groups
def profile(
    workloads: WorkloadOptions,
    means: MeasurementOptions,
    instead: OtherMeasurements,
    cluster: ClusterOptions,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="ONNX files, or NAME=FILE.", show_default=False)
    ] = None,
    db: Annotated[Path, typer.Option(envvar="GPUPROF_DB", help="Kernel database.")] = Path("gpuprof-db"),
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Measure models on this machine: latency, throughput, memory and the time of every op.

    What is in the database already is not measured again; interrupted, it goes on where it was.
    """
    chosen = chosen_format(as_json, as_csv)
    if instead.from_report:
        reports = ingest_reports(instead.from_report, models or [], workloads.batch, workloads.share, means.device, db)
        print_ingested(reports, chosen)
        return
    if not models:
        raise InputError("no model was named", "gpuprof profile MODEL.onnx; gpuprof zoo build makes some")
    if cluster.engine != "local":
        words = cluster.words(workloads, means, instead)
        sweep_cluster(models, workloads.batch, words, (db, means.device, cluster.ray_address or ""), chosen)
    elif instead.per_op:
        _measure_ops(models, workloads, means, db, chosen)
    else:
        _measure(models, workloads, means, (db, instead.igniter), chosen)


def _measure(
    models: Sequence[str],
    workloads: WorkloadOptions,
    means: MeasurementOptions,
    where: tuple[Path, bool],
    chosen: Format,
) -> None:
    """Measure whole models into a database, at the configurations of iGniter if that is asked."""
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.profiling.collector import choose
    from gpuprof.profiling.sweep import planning
    from gpuprof.profiling.sweep.campaign import Campaign
    from gpuprof.profiling.sweep.igniter_cells import igniter_cells

    db, igniter = where
    here = resolve_local_device(means.device, means.collector, say_note)
    batches, shares = planning.parse_batches(workloads.batch), planning.parse_shares(workloads.share, here)
    neighbours = [planning.parse_neighbour(text, here) for text in workloads.beside or ()]
    named = _named(models, batches, db)
    measuring, why = choose(means.collector, here.kind)
    if igniter:
        cells = tuple(cell for model in named for cell in igniter_cells(model))
    else:
        cells = planning.plan_cells(named, batches, shares, planning.parse_batches(workloads.processes), neighbours)
    say(f"{here.name}, collector {why}")
    campaign = Campaign(KernelDb.create(db), here, measuring, means.force, means.limits())
    outcomes = _run(campaign, cells)
    print_rows([row for outcome in outcomes for row in _rows(outcome)], _COLUMNS, chosen)
    _say_what_mixes(campaign, cells)
    _judge(outcomes, db)


def _measure_ops(
    models: Sequence[str], workloads: WorkloadOptions, means: MeasurementOptions, db: Path, chosen: Format
) -> None:
    """Measure each distinct op of all models into a database."""
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.profiling.collector import choose
    from gpuprof.profiling.per_op.per_op import PerOp
    from gpuprof.profiling.sweep import planning

    if workloads.beside or workloads.processes != "1":
        raise InputError("--per-op measures ops one by one", "leave out --beside and --processes")
    here = resolve_local_device(means.device, means.collector, say_note)
    batches, shares = planning.parse_batches(workloads.batch), planning.parse_shares(workloads.share, here)
    named = _named(models, batches, db)
    measuring, why = choose(means.collector, here.kind)
    plans = [PerOp(KernelDb.create(db), here, measuring, part, means.force) for part in shares]
    say(f"{here.name}, collector {why}")
    print_rows([row for plan in plans for row in _run_ops(plan, named, batches, chosen)], _OP_COLUMNS, chosen)


def _named(models: Sequence[str], batches: Sequence[int], db: Path) -> list[NamedModel]:
    from gpuprof.kernel_db.store import COPIES
    from gpuprof.profiling.sweep import planning

    return [planning.free_batch_model(model, batches, db / COPIES) for model in planning.parse_models(models)]


def _say_what_mixes(campaign: Campaign, cells: Sequence[Cell]) -> None:
    from gpuprof.runtime.batch_verdicts import describe_mixing

    for graph in {cell.job.graph.name: cell.job.graph for cell in cells}.values():
        if (output := campaign.verdicts.mixed_output(graph.sha256)) is not None:
            say(f"gpuprof: {describe_mixing(graph.name, output)}; place and serve give it batches of 1")


def _run(campaign: Campaign, cells: Sequence[Cell]) -> list[CellResult]:
    outcomes = []
    with progress() as bar:
        task = bar.add_task("starting", total=len(cells))
        for outcome in campaign.run(cells, lambda cell: bar.update(task, description=str(cell))):
            outcomes.append(outcome)
            bar.advance(task)
        bar.update(task, description="what the device can do at best")
        campaign.measure_ceilings([cell.job.share for cell in cells])
        bar.update(task, description="what serving adds to a request")
        measure_serving(campaign.database, campaign.device, say)
    old = sum(not outcome.measured_now for outcome in outcomes)
    if old:
        say(f"{old} of {len(outcomes)} were measured before; --force measures them again")
    return outcomes


def _run_ops(
    plan: PerOp, models: Sequence[NamedModel], batches: Sequence[int], chosen: Format
) -> Iterable[Mapping[str, Any]]:
    """Measure what is missing; return each op for programs, a line for each type for people."""
    missing, outcomes = plan.pending(models, batches)
    with progress() as bar:
        task = bar.add_task(f"ops on {plan.share}", total=len(missing))
        for outcome in plan.run(missing):
            outcomes.append(outcome)
            bar.advance(task)
    if chosen is not Format.TABLE:
        return [{**outcome.row, "measured_now": outcome.measured_now} for outcome in outcomes]
    return _by_type(outcomes, str(plan.share))


def _by_type(outcomes: Sequence[OpOutcome], share: str) -> list[dict[str, Any]]:
    types: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        row = outcome.row
        line = types.setdefault(
            str(row["op_type"]),
            {"op_type": row["op_type"], "share": share, "ops": 0, "new": 0, "untimed": 0, "sum_ms": 0.0},
        )
        line["ops"] += 1
        line["new"] += outcome.measured_now
        line["untimed"] += row["duration_p50_ns"] is None
        line["sum_ms"] += (row["duration_p50_ns"] or 0) / 1e6
    return sorted(types.values(), key=lambda line: -line["sum_ms"])


def _rows(outcome: CellResult) -> list[dict[str, Any]]:
    rows: list[Mapping[str, Any]] = [outcome.row, *outcome.others]
    return [{**row, "share": _share(row), "measured_now": outcome.measured_now} for row in rows]


def _share(row: Mapping[str, Any]) -> str:
    from gpuprof.domain.share import Share

    return str(Share(row["sm_share_pct"], row["mig_profile"]))


def _judge(outcomes: Sequence[CellResult], db: Path) -> None:
    """Raise when something failed or cannot be trusted; the rows are in the database all the same."""
    failed = [outcome for outcome in outcomes if outcome.row.get("error")]
    if failed:
        raise UnavailableError(f"{len(failed)} of {len(outcomes)} could not be measured: {failed[0].row['error']}")
    shaky = [outcome for outcome in outcomes if outcome.row.get("stable") is False]
    if shaky:
        raise UnstableError(
            f"{len(shaky)} of {len(outcomes)} are unstable, first {shaky[0].cell}: the machine is too noisy",
            f"they are kept and marked in {db}; the same command measures them again",
        )
