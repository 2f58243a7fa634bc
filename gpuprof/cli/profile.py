"""``gpuprof profile``: measure models and keep what was measured in the kernel database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuprof.cli.cluster_sweep import sweep_cluster
from gpuprof.cli.local import local_device
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
)
from gpuprof.cli.reports import ingest_reports, print_ingested
from gpuprof.cli.serving_cost import measure_serving
from gpuprof.errors import InputError, UnavailableError, UnstableError

if TYPE_CHECKING:
    from gpuprof.profiling.per_op.per_op import OpOutcome, PerOp
    from gpuprof.profiling.sweep.campaign import Campaign, Cell, Outcome
    from gpuprof.profiling.sweep.planning import NamedModel

#: Below the database: copies of models with a fixed batch that take any.
MODELS = ".models"
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


def profile(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="ONNX files, or NAME=FILE.", show_default=False)
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,2,4,8",
    share: Annotated[
        str | None,
        typer.Option(help="Shares: 50 (percent), 1core, 3g.40gb. On a CPU, by default, 1, 2, 4, … and all cores."),
    ] = None,
    processes: Annotated[str, typer.Option(help="Copies that run at once in the share, separated by commas.")] = "1",
    beside: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL[:BATCH[:SHARE]]", help="Measure again with this running, too; repeatable."),
    ] = None,
    collector: Annotated[str, typer.Option(help="What measures; auto takes the first that works here.")] = "auto",
    db: Annotated[Path, typer.Option(envvar="GPUPROF_DB", help="Kernel database.")] = Path("gpuprof-db"),
    force: Annotated[bool, typer.Option("--force", help="Measure what is in the database already, too.")] = False,
    per_op: Annotated[
        bool, typer.Option("--per-op", help="Measure each distinct op of all models once, as a model of its own.")
    ] = False,
    igniter: Annotated[
        bool,
        typer.Option("--igniter", help="Measure what calibrate needs: 11 configurations, 2 to 5 copies at once."),
    ] = False,
    from_report: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="REPORT",
            help="Run nothing, ingest this: .nsys-rep, .sqlite, .ncu-rep, .csv or trace.json; nsys's and ncu's "
            "reports of one run, both named, are joined kernel by kernel.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, gpu or a GPU's name. By default the first GPU that can be measured here, else the CPU; with "
            "--from-report the GPU recorded on, where the report does not say."
        ),
    ] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for the timing of one row at most.")] = 10.0,
    profiler_limit: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a profiler counts as hung and is ended.")
    ] = 900.0,
    engine: Annotated[
        str, typer.Option(help="Where to measure: local, or ray: spread over the GPUs, or machines, of a Ray cluster.")
    ] = "local",
    ray_address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="The Ray cluster; the one of this machine unless given.")
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Measure models on this machine: latency, throughput, memory and the time of every op.

    What is in the database already is not measured again; interrupted, it goes on where it was.
    """
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.profiling.child.job import limits_within
    from gpuprof.profiling.collector import choose
    from gpuprof.profiling.per_op.per_op import PerOp
    from gpuprof.profiling.sweep import planning
    from gpuprof.profiling.sweep.campaign import Campaign
    from gpuprof.profiling.sweep.igniter_cells import igniter_cells

    chosen = chosen_format(as_json, as_csv)
    if from_report:
        print_ingested(ingest_reports(from_report, models or [], batch, share, device, db), chosen)
        return
    if not models:
        raise InputError("no model was named", "gpuprof profile MODEL.onnx; gpuprof zoo build makes some")
    if engine != "local":
        if engine != "ray" or per_op:
            raise InputError(f"--engine must be local, or ray without --per-op, but got {engine}")
        options = {"share": share, "processes": processes, "collector": collector, "time-limit": f"{time_limit:g}"}
        options["profiler-limit"] = f"{profiler_limit:g}"
        flags = [*[f"--beside={text}" for text in beside or ()], *["--force"] * force, *["--igniter"] * igniter]
        extra = [*(f"--{name}={value}" for name, value in options.items() if value is not None), *flags]
        sweep_cluster(models, batch, extra, (db, device, ray_address or ""), chosen)
        return
    here = local_device(device, collector)
    batches, shares = planning.parse_batches(batch), planning.parse_shares(share, here)
    neighbours = [planning.parse_neighbour(text, here) for text in beside or ()]
    named = [planning.freed(model, batches, db / MODELS) for model in planning.parse_models(models)]
    measuring, why = choose(collector, here.kind)
    if per_op:
        if beside or processes != "1":
            raise InputError("--per-op measures ops one by one", "leave out --beside and --processes")
        plans = [PerOp(KernelDb.create(db), here, measuring, part, force) for part in shares]
        say(f"{here.name}, collector {why}")
        print_rows([row for plan in plans for row in _run_ops(plan, named, batches, chosen)], _OP_COLUMNS, chosen)
        return
    if igniter:
        cells = tuple(cell for model in named for cell in igniter_cells(model))
    else:
        cells = planning.plan_cells(named, batches, shares, planning.parse_batches(processes), neighbours)
    say(f"{here.name}, collector {why}")
    campaign = Campaign(KernelDb.create(db), here, measuring, force, limits_within(time_limit, profiler_limit))
    outcomes = _run(campaign, cells)
    print_rows([row for outcome in outcomes for row in _rows(outcome)], _COLUMNS, chosen)
    _judge(outcomes, db)


def _run(campaign: Campaign, cells: Sequence[Cell]) -> list[Outcome]:
    outcomes = []
    with progress() as bar:
        task = bar.add_task("starting", total=len(cells))
        for outcome in campaign.run(cells, lambda cell: bar.update(task, description=str(cell))):
            outcomes.append(outcome)
            bar.advance(task)
        bar.update(task, description="what the device can do at best")
        campaign.measure_ceilings([cell.job.share for cell in cells])
        bar.update(task, description="what serving adds to a request")
        measure_serving(campaign.database, campaign.device)
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


def _rows(outcome: Outcome) -> list[dict[str, Any]]:
    rows: list[Mapping[str, Any]] = [outcome.row, *outcome.others]
    return [{**row, "share": _share(row), "measured_now": outcome.measured_now} for row in rows]


def _share(row: Mapping[str, Any]) -> str:
    from gpuprof.share import Share

    return str(Share(row["sm_share_pct"], row["mig_profile"]))


def _judge(outcomes: Sequence[Outcome], db: Path) -> None:
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
