"""``gpuprof compare``: two databases, the maps of several policies for the same demands, or kinds of GPUs."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

import gpuprof
from gpuprof.cli.output import Format, print_rows, print_text, say_note, show_progress
from gpuprof.cli.place import DemandOptions
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.table import Column, make_columns
from gpuprof.domain.validation import NotNegative
from gpuprof.errors import InfeasibleError, InputError
from gpuprof.pipeline.compare import SHOW
from gpuprof.pipeline.settings import Names, Settings, option
from gpuprof.placement.policies import DEFAULT

_SOURCE = re.compile(r"\d[\d,]* replicas? \((\S+) of the requests\) ([^;]+)")


def _to_percent(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, int | float) else "–"


def _shorten_sources(value: object) -> str:
    """Show ``"2 replicas (87% of the requests) measured; …"`` as ``"measured 87%; …"``."""
    return _SOURCE.sub(r"\2 \1", str(value)) if value else "–"


def _show_interval(value: object) -> str:
    return " … ".join(map(NumberFormat(3), value)) if isinstance(value, tuple) else "–"


_SHOW = {
    "cost_per_million_interval": _show_interval,
    "compute_utilization": _to_percent,
    "external_fragmentation": _to_percent,
    "internal_slack": _to_percent,
    "seconds": lambda value: f"{value:,.2f}",
    "sources": _shorten_sources,
}
_COLUMNS = make_columns(
    "policy gpus cost_per_hour goodput_rps missing_rps internal_slack:unused_in_shares "
    "external_fragmentation:not_allocated fairness lower_bound_gpus:bound gpus_at_lower_ends:GPUs_at_lower_ends "
    "gpus_at_upper_ends:GPUs_at_upper_ends seconds sources:times remark",
    _SHOW,
)
_GPU_COLUMNS = make_columns(
    "device cost_per_million:$/million_requests cost_per_million_interval:interval compute_utilization:busy gpus "
    "cost_per_hour price_date:price_of missing_rps lower_bound_gpus:bound gpus_at_upper_ends:GPUs_at_upper_ends "
    "sources:times remark",
    _SHOW,
)
_CELL_COLUMNS = make_columns(
    "model dims device share processes batch before_ms after_ms change_pct:change smallest_pct:smallest_seen runs "
    "verdict ops:from",
    SHOW,
)


class PolicyListOptions(Settings):
    """What the rows of the comparison are: policies or GPUs."""

    title: ClassVar[str] = "Comparison"

    by: Literal["policy", "gpu"] = option("policy", "Rows: policies on one fleet, or each kind of gpu alone.")
    policies: Names = option(
        (), "Policies by name, separated by commas; default: all; with --by gpu optimal.", values="policies"
    )


class DatabaseOptions(Settings):
    """Options for comparing two databases, and the report files."""

    title: ClassVar[str] = "Comparison of databases"

    threshold_pct: NotNegative = option(
        0.0, "Slowdown in percent that is tolerated; beyond it the exit code is 1.", "--threshold", metavar="PERCENT"
    )
    markdown: bool = option(False, "Print markdown instead of a table.")
    junit: Path | None = option(
        None, "JUnit file to write, with a test case for each model, batch and share.", output="file"
    )


def compare(
    databases: DatabaseOptions,
    demands: DemandOptions,
    policies: PolicyListOptions,
    rules: gpuprof.PlanningOptions,
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BEFORE AFTER]",
            help="Two databases, or parts of one: DB@2026-01-31, DB@2026-01-01..2026-01-31, DB@driver=550.54 "
            "(runtime_version, model_sha256, host); without DB that of --db.",
            show_default=False,
        ),
    ] = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Compare two databases: faster, slower or no difference; else several policies, or kinds of GPUs, for demands.

    Without BEFORE and AFTER the demands of --slo-file are placed by each policy, or on each kind of GPU.
    """
    if sides:
        _compare_databases(sides, databases, demands.db, chosen)
        return
    is_by_gpu = policies.by == "gpu"
    with show_progress() as show:
        if is_by_gpu:
            if len(policies.policies) > 1:
                raise InputError(f"--by gpu plans by one policy but got {', '.join(policies.policies)}", "name one")
            policy = (policies.policies or (DEFAULT,))[0]
            compare_rows = partial(gpuprof.compare_gpus, fleet=demands.gpus or "any", policy=policy)
        else:
            compare_rows = partial(gpuprof.compare, fleet=demands.gpus, policies=policies.policies or None)
        result = compare_rows(demands.slo_file, db=demands.db, options=rules, progress=show, note=say_note)
    rows = result.rows()
    _print(rows, _GPU_COLUMNS if is_by_gpu else _COLUMNS, chosen)
    if not any(row["gpus"] for row in rows):
        raise InfeasibleError(f"no {'kind of GPU' if is_by_gpu else 'policy'} places any of the demands")


def _compare_databases(sides: Sequence[str], options: DatabaseOptions, db: Path | None, chosen: Format) -> None:
    if len(sides) == 1 and sides[0].endswith(".csv"):
        raise InputError(
            f"compare takes two databases but got {sides[0]}", f"demands are given by --slo-file {sides[0]}"
        )
    if len(sides) != 2:
        raise InputError(f"compare takes two databases but got {len(sides)}", "gpuprof compare BEFORE AFTER")
    result = gpuprof.compare_databases(*sides, db=db, threshold_pct=options.threshold_pct, note=say_note)
    if options.markdown:
        sys.stdout.write(result.to_markdown())
    elif chosen is Format.TABLE:
        print_text(result.verdict())
        rows = [{**row, "runs": f"{row['runs_before']} / {row['runs_after']}"} for row in result.rows()]
        print_rows(rows, _CELL_COLUMNS, chosen)
    else:
        print_rows(result.rows(), _CELL_COLUMNS[:-1], chosen)
    if options.junit is not None:
        result.write_junit(options.junit)
    result.raise_if_slower()


def _print(rows: Sequence[Mapping[str, object]], columns: Sequence[Column], chosen: Format) -> None:
    """Print the comparison; remarks are printed below a table, where they do not widen every row."""
    if chosen is not Format.TABLE:
        print_rows(rows, columns, chosen)
        return
    print_rows(rows, [column for column in columns if column.key != "remark"], chosen)
    first = columns[0].key
    for row in rows:
        if row.get("remark"):
            print_text(f"{row[first]}: {row['remark']}")
