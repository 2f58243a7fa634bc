"""``gpuprof compare``: what each policy makes of the same demands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import Column, CsvOption, Format, JsonOption, chosen_format, number, print_rows, say
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.placement.comparison import Outcome
    from gpuprof.placement.problem import Problem

_COLUMNS = (
    Column("policy", "policy", right=False),
    Column("gpus", "GPUs"),
    Column("cost_per_hour", "$/h", number(4)),
    Column("goodput_rps", "goodput/s", number(4)),
    Column("missing_rps", "missing/s", number(4)),
    Column("internal_slack", "idle within", number(2)),
    Column("external_fragmentation", "outside", number(2)),
    Column("fairness", "fairness", number(3)),
    Column("lower_bound_gpus", "bound"),
    Column("seconds", "seconds", number(2)),
    Column("remark", "remark", right=False),
)


def compare(
    slo_file: Annotated[Path, typer.Option(help="CSV with model,rate_rps,slo_ms.")] = Path("slo.csv"),
    policies: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    gpus: Annotated[
        str | None, typer.Option(help="Devices: a100-80:8,v100; without a count as many as needed.")
    ] = None,
    fleet: Annotated[Path | None, typer.Option(help="fleet.toml with devices, counts and prices.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the maps into this .svg or .png file.")] = None,
    confidence: Annotated[float | None, typer.Option(help="Plan on the upper end of the intervals.")] = None,
    latency_budget: Annotated[
        float | None, typer.Option(help="Instead of queueing: a batch may take this fraction of the SLO.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Largest batch size.")] = 256,
    max_processes: Annotated[
        int | None, typer.Option(help="Most processes of one replica; three in a MIG instance, else one.")
    ] = None,
    overhead_ms: Annotated[float, typer.Option(help="Time that a request spends outside its replica.")] = 0.0,
    time_limit: Annotated[float | None, typer.Option(help="Seconds for each policy that searches.")] = None,
    seed: Annotated[int, typer.Option(help="Of policies that draw random numbers.")] = 0,
    db: Annotated[Path | None, typer.Option(help="Kernel database.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Place the same demands by several policies, with one estimator and one check, and show what each needs."""
    from gpuprof.cli.planning import build_problem
    from gpuprof.placement.comparison import compare as run
    from gpuprof.placement.policies import make_policy, policy_names
    from gpuprof.placement.problem import Options

    chosen = chosen_format(as_json, as_csv)
    if picture is not None and picture.suffix not in {".svg", ".png"}:
        raise InputError(f"a picture is .svg or .png but got {picture}")
    options = Options(
        confidence=confidence,
        latency_budget=latency_budget,
        max_batch=max_batch,
        max_processes=max_processes,
        overhead_ms=overhead_ms,
        time_limit_s=time_limit,
        seed=seed,
    )
    names = policy_names() if policies == "all" else [name.strip() for name in policies.split(",") if name.strip()]
    made = [(name, make_policy(name)) for name in names]
    problem = build_problem(slo_file, gpus, fleet, db, options)
    outcomes = run(problem, made)
    print_rows([_row(outcome) for outcome in outcomes], _COLUMNS, chosen)
    if picture is not None:
        _draw(outcomes, problem, picture)
        if chosen is Format.TABLE:
            say(f"gpuprof: drawn to {picture}")


def _row(outcome: Outcome) -> dict[str, object]:
    figures, deployment = outcome.objective, outcome.deployment
    remark = outcome.reason
    if outcome.violations:
        remark = f"NOT SOUND, {len(outcome.violations)} rules broken, first: {outcome.violations[0]}"
    return {
        "policy": outcome.policy,
        "gpus": None if figures is None else figures.gpus,
        "cost_per_hour": None if figures is None else figures.cost_per_hour,
        "goodput_rps": None if figures is None else figures.goodput_rps,
        "missing_rps": None if figures is None else outcome.missing_rps,
        "internal_slack": None if figures is None else figures.internal_slack,
        "external_fragmentation": None if figures is None else figures.external_fragmentation,
        "compute_utilization": None if figures is None else figures.compute_utilization,
        "memory_utilization": None if figures is None else figures.memory_utilization,
        "fairness": None if figures is None else figures.fairness,
        "lower_bound_gpus": None if deployment is None else deployment.predicted.lower_bound_gpus,
        "seconds": outcome.seconds,
        "remark": remark,
    }


def _draw(outcomes: Sequence[Outcome], problem: Problem, path: Path) -> None:
    from gpuprof.placement.bitmap import to_png
    from gpuprof.placement.picture import draw, to_svg

    devices = {entry.device.name: entry.device for entry in problem.fleet.entries}
    maps = [(f"{one.policy}: {len(_used(one))} devices", one.deployment) for one in outcomes if one.deployment]
    scene = draw(maps, devices)
    content = to_svg(scene).encode() if path.suffix == ".svg" else to_png(scene)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def _used(outcome: Outcome) -> list[object]:
    return [] if outcome.deployment is None else [gpu for node in outcome.deployment.nodes for gpu in node.gpus]
