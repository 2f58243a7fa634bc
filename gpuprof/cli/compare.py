"""``gpuprof compare``: the maps of several policies for the same demands, or the GPUs that they need of each kind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.completion import complete_policies
from gpuprof.cli.duration_option import duration_option
from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import (
    Column,
    CsvOption,
    Format,
    JsonOption,
    chosen_format,
    print_rows,
    print_text,
    say_note,
    show_progress,
)
from gpuprof.cli.output_path import check_output_file
from gpuprof.cli.planning_options import DemandOptions, PlanningRuleOptions
from gpuprof.cli.shared_options import PolicySeedOption
from gpuprof.cli.table import ColumnRole
from gpuprof.domain.demand import Demand
from gpuprof.domain.number_format import number_formatter
from gpuprof.errors import InfeasibleError, InputError

_COLUMNS = (
    Column("policy", "policy", right=False, role=ColumnRole.SUBJECT),
    Column("gpus", "GPUs"),
    Column("cost_per_hour", "$/h", number_formatter(4)),
    Column("goodput_rps", "goodput/s", number_formatter(4)),
    Column("missing_rps", "missing/s", number_formatter(4)),
    Column("internal_slack", "unused in shares", lambda value: _to_percent(value)),
    Column("external_fragmentation", "not allocated", lambda value: _to_percent(value)),
    Column("fairness", "fairness", number_formatter(3)),
    Column("lower_bound_gpus", "bound"),
    Column("gpus_at_lower_ends", "GPUs at lower ends", role=ColumnRole.DERIVED),
    Column("gpus_at_upper_ends", "GPUs at upper ends"),
    Column("seconds", "seconds", lambda value: _to_hundredths(value)),
    Column("sources", "times", lambda value: _shorten_sources(value), right=False),
    Column("remark", "remark", right=False),
)
_SOURCE = re.compile(r"\d[\d,]* replicas? \((\S+) of the requests\) ([^;]+)")
#: Columns that not every comparison has: least numbers, which few policies give, and what a plan comes to at the ends
#: of the estimates' intervals, where not everything was measured.
_SOMETIMES = frozenset({"lower_bound_gpus", "gpus_at_lower_ends", "gpus_at_upper_ends"})

_GPU_COLUMNS = (
    Column("device", "device", right=False),
    Column("gpus", "GPUs"),
    Column("cost_per_hour", "$/h", number_formatter(4)),
    Column("gpus_at_lower_ends", "GPUs at lower ends"),
    Column("gpus_at_upper_end", "GPUs at upper ends"),
    Column("cost_per_hour_at_upper_end", "$/h at upper ends", number_formatter(4)),
    Column("utilization_pct", "busy %", number_formatter(2)),
    Column("missing_rps", "missing/s", number_formatter(4)),
    Column("lower_bound_gpus", "bound"),
    Column("interval_factor", "times within ×", number_formatter(3)),
    Column("seconds", "seconds", lambda value: _to_hundredths(value)),
    Column("sources", "times", lambda value: _shorten_sources(value), right=False),
    Column("remark", "remark", right=False),
)


class Compared(StrEnum):
    """What each row of the comparison is."""

    POLICY = "policy"
    GPU = "gpu"


@dataclass(frozen=True)
class PolicyListOptions:
    """What is compared, and how policies search."""

    by: Annotated[Compared, typer.Option(help="Rows to compare: policies on one fleet, or each kind of gpu alone.")] = (
        Compared.POLICY
    )
    policies: Annotated[
        str,
        typer.Option(
            autocompletion=complete_policies, help="Policies by name, separated by commas, or all; with --by gpu one."
        ),
    ] = "all"
    time_limit: Annotated[
        float | None,
        duration_option("--time-limit", "Longest search of each policy; default: 30s, with --by gpu 5s."),
    ] = None
    seed: PolicySeedOption = 0

    def names(self) -> list[str] | None:
        """Return the names of the policies, None for all. Raises `InputError` when none is named."""
        names = [name.strip() for name in self.policies.split(",") if name.strip()]
        if not names:
            raise InputError(f"--policies names no policy: {self.policies!r}", "name some, as in ffd,optimal, or all")
        if names == ["all"]:
            return None
        if "all" in names:
            raise InputError(f"--policies {self.policies} names policies beside all", "leave the others out, or all")
        if len(set(names)) < len(names):
            raise InputError(f"--policies {self.policies} names a policy twice", "name each once")
        return names

    def only_name(self) -> str:
        """Return the policy that plans for each kind of GPU. Raises `InputError` when several are named."""
        from gpuprof.placement.policies import DEFAULT

        names = self.names() or [DEFAULT]
        if len(names) > 1:
            raise InputError(f"--by gpu plans by one policy but got {', '.join(names)}", f"--policies {DEFAULT}")
        return names[0]


@dataclass(frozen=True)
class ComparisonRuleOptions(PlanningRuleOptions):
    """What every map must keep, and how large its replicas may be."""

    confidence: Annotated[
        float | None, typer.Option(help="Confidence to plan with, on the upper ends of the intervals.")
    ] = None


@with_groups
def compare(
    demands: DemandOptions,
    policies: PolicyListOptions,
    rules: ComparisonRuleOptions,
    picture: Annotated[
        Path | None, typer.Option(callback=check_output_file, help="Draw the maps into this .svg or .png file.")
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Place the same demands by several policies, or on each kind of GPU, and show what each needs."""
    chosen = chosen_format(as_json, as_csv)
    asked = demands.read_file()
    if policies.by is Compared.GPU:
        if picture is not None:
            raise InputError("--picture draws maps of policies and not of kinds of GPUs", "leave it out")
        _compare_gpus(asked, demands, policies, rules, chosen)
        return
    from gpuprof.pipeline.compare import compare as compare_policies
    from gpuprof.reporting.picture import check_picture

    if picture is not None:
        check_picture(picture)
    with show_progress() as show:
        result = compare_policies(
            asked,
            fleet=demands.devices(),
            db=demands.db,
            policies=policies.names(),
            options=rules.planning_options(policies.time_limit, policies.seed, demands.dims()),
            progress=show,
            note=say_note,
        )
    rows = result.rows()
    given = {key for row in rows for key, value in row.items() if value is not None}
    _print(rows, [one for one in _COLUMNS if one.key not in _SOMETIMES or one.key in given], chosen)
    if picture is not None:
        result.draw(picture)
        if chosen is Format.TABLE:
            say_note(f"drawn to {picture}")
    _require_any(rows, "policy")


def _compare_gpus(
    asked: Sequence[Demand],
    demands: DemandOptions,
    policies: PolicyListOptions,
    rules: ComparisonRuleOptions,
    chosen: Format,
) -> None:
    from gpuprof.pipeline.compare_gpus import compare_gpus

    with show_progress() as show:
        result = compare_gpus(
            asked,
            fleet=demands.devices(),
            db=demands.db,
            policy=policies.only_name(),
            options=rules.planning_options(policies.time_limit, policies.seed, demands.dims()),
            progress=show,
            note=say_note,
        )
    rows = result.rows()
    _print(rows, _GPU_COLUMNS, chosen)
    _require_any(rows, "kind of GPU")


def _print(rows: Sequence[Mapping[str, object]], columns: Sequence[Column], chosen: Format) -> None:
    """Print the comparison; for people remarks come below it, where they do not widen every row."""
    if chosen is not Format.TABLE:
        print_rows(rows, columns, chosen)
        return
    print_rows(rows, [column for column in columns if column.key != "remark"], chosen)
    first = columns[0].key
    for row in rows:
        if row.get("remark"):
            print_text(f"{row[first]}: {row['remark']}")


def _require_any(rows: Sequence[Mapping[str, object]], compared: str) -> None:
    """Raise `InfeasibleError` when no row places anything."""
    if not any(row["gpus"] for row in rows):
        raise InfeasibleError(f"no {compared} places any of the demands")


def _to_hundredths(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else "–"


def _to_percent(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, int | float) else "–"


def _shorten_sources(value: object) -> str:
    """Show ``"2 replicas (87% of the requests) measured; …"`` as ``"measured 87%; …"``."""
    return _SOURCE.sub(r"\2 \1", str(value)) if value else "–"
