"""Verbs of maps: ``check`` and ``explain``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

import gpuprof
from gpuprof.cli.options import MapFileArgument
from gpuprof.cli.output import Format, print_json, print_rows, print_text, say_note, show_progress
from gpuprof.domain.map_sources import record_basis
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.plural import count_of
from gpuprof.domain.table import make_columns

_FAULTS = make_columns("rule where times message:what_is_wrong")


def check(
    options: gpuprof.CheckOptions, map_file: MapFileArgument = Path("map.json"), chosen: Format = Format.TABLE
) -> None:
    """Check geometry, shares, memory, rates and SLOs of a map; exit 1 when it breaks a rule."""
    result = gpuprof.check(map_file, options, note=say_note)
    rows = result.rows()
    if chosen is Format.JSON:
        basis = record_basis(result.deployment)
        verdict = {"sound": result.is_sound, "believes_times": result.believes_times}
        print_json({"map": str(map_file), **verdict, "basis": basis, "violations": rows})
    elif chosen is Format.CSV:
        print_rows(rows, _FAULTS, chosen)
    elif rows:
        print_rows(group_equal(rows), _FAULTS, chosen)
    else:
        replicas = sum(1 for _ in result.deployment.places())
        devices = count_of(result.deployment.predicted.gpus, "device")
        condition = " if its written times are right" if result.believes_times else ""
        sys.stdout.write(f"{map_file} is sound{condition}: {count_of(replicas, 'replica')} on {devices}\n")
    result.raise_if_broken()


def group_equal(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return a row for each rule and message, with the places that break the rule and their number."""
    places: dict[tuple[object, object], list[str]] = {}
    for row in rows:
        places.setdefault((row["rule"], row["message"]), []).append(str(row["where"]))
    return [
        {"rule": rule, "where": ", ".join(dict.fromkeys(where)), "times": len(where), "message": message}
        for (rule, message), where in places.items()
    ]


_ALTERNATIVES = make_columns(
    "device share batch processes capacity_rps:serves_req/s tail_ms:percentile_ms replicas:needed cost "
    "chosen:in_the_map source"
)
_PLACES = make_columns("where:stands_on share batch rate_rps beside free_pct")
_NEIGHBOURS = make_columns(
    "where:stands_on share batch neighbour added_ms:adds_ms added_pct:adds_% alone_ms beside_ms:beside_all_ms "
    "interval:90%_interval basis:known_from"
)
_WHAT_IFS = make_columns("change:demand gpus:devices shares:replicas missing_rps:not_served/s")


def explain(
    options: gpuprof.ExplainOptions,
    map_file: MapFileArgument = Path("map.json"),
    model: Annotated[
        str,
        typer.Argument(
            help="Model of the map; may stand alone, without MAP; default: its only model.", show_default=False
        ),
    ] = "",
    chosen: Format = Format.TABLE,
) -> None:
    """Show the alternatives of a model's replicas, and the effect of 10% more rate or a 10% shorter SLO.

    For each neighbour on the same device, prints the slow-down of a batch and its source.
    With --csv, prints only the alternatives.
    """
    if not model and not map_file.exists() and map_file.suffix != ".json":
        map_file, model = Path("map.json"), str(map_file)
    with show_progress() as show:
        result = gpuprof.explain(map_file, model, options, progress=show, note=say_note)
    places, choices, changes = result.place_rows(), result.rows(), result.what_if_rows()
    neighbours = result.neighbour_rows()
    if chosen is Format.CSV:
        print_rows(choices, _ALTERNATIVES, chosen)
        return
    if chosen is Format.JSON:
        parts = {"places": places, "neighbours": neighbours, "alternatives": choices, "what_if": changes}
        print_json({"model": result.model, **parts})
        return
    demand, model = result.deployment.models[result.model], result.model
    sys.stdout.write(
        f"{model}: {demand.rate_rps:,.6g} requests/s, {demand.percentile:g}% of them within {demand.slo_ms:g} ms\n\n"
    )
    print_rows(places, _PLACES, Format.TABLE)
    if neighbours:
        sys.stdout.write("\nWhat each neighbour adds to the time of a batch:\n")
        print_rows([{**row, "interval": _interval(row)} for row in neighbours], _NEIGHBOURS, Format.TABLE)
    sys.stdout.write("\nThe best batch under each share, cheapest first\n")
    print_text("(cost: dollars an hour, or devices where none has a price):")
    if any(row["at_upper_end"] for row in choices):
        print_text("(percentile ms: as planned, with unsure times towards the upper ends of their intervals)")
    print_rows(choices, _ALTERNATIVES, Format.TABLE)
    sys.stdout.write(f"\nWhat {result.planner} would do:\n")
    print_rows(changes, _WHAT_IFS, Format.TABLE)


def _interval(row: Mapping[str, object]) -> str | None:
    ends = row["interval_ms"]
    if not isinstance(ends, list):
        return None
    format_number = NumberFormat(3)
    return f"{format_number(ends[0])} … {format_number(ends[1])}"
