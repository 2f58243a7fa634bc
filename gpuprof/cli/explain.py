"""``gpuprof explain``: why a model got this batch, share and place."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import Column, Format, JsonOption, number, print_json, print_rows, say_note
from gpuprof.errors import unknown_name

if TYPE_CHECKING:
    from gpuprof.placement.explanation import Alternative, WhatIf

_ALTERNATIVES = (
    Column("device", "device", right=False),
    Column("share", "share", right=False),
    Column("batch", "batch"),
    Column("processes", "procs"),
    Column("capacity_rps", "serves req/s", number(4)),
    Column("tail_ms", "at ms", number()),
    Column("replicas", "needed"),
    Column("cost", "cost", number(3)),
    Column("chosen", "in the map"),
)
_SEATS = (
    Column("where", "stands on", right=False),
    Column("share", "share", right=False),
    Column("batch", "batch"),
    Column("rate_rps", "req/s", number(4)),
    Column("beside", "beside", right=False),
    Column("free_pct", "free %", number(3)),
)
_WHAT_IFS = (
    Column("change", "demand", right=False),
    Column("gpus", "devices"),
    Column("shares", "replicas", right=False),
    Column("missing_rps", "not served/s", number(3)),
)


def explain(
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map.")],
    model: Annotated[str, typer.Argument(help="A model of the map.")],
    db: Annotated[Path | None, typer.Option(help="Kernel database that the map was planned from.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the model could have had instead, and what 10% more rate or 10% less SLO would change."""
    from gpuprof.domain.deployment import read_map
    from gpuprof.pipeline.recorded_problem import map_policy, map_problem
    from gpuprof.placement.explanation import alternatives, seats, what_ifs

    deployment = read_map(map_file)
    if model not in deployment.models:
        raise unknown_name("model of the map", model, sorted(deployment.models))
    problem = map_problem(deployment, db, say_note)
    choices = [_alternative(one) for one in alternatives(problem, deployment, model)]
    places = [{**asdict(one), "beside": ", ".join(one.beside) or "nobody"} for one in seats(deployment, model)]
    changes = [_what_if(one) for one in what_ifs(problem, map_policy(deployment), model)]
    if as_json:
        print_json({"model": model, "places": places, "alternatives": choices, "what_if": changes})
        return
    asked = deployment.models[model]
    sys.stdout.write(
        f"{model}: {asked.rate_rps:g} requests/s, {asked.percentile:g}% of them within {asked.slo_ms:g} ms\n\n"
    )
    print_rows(places, _SEATS, Format.TABLE)
    sys.stdout.write(
        "The best batch under each share, cheapest first (cost: dollars an hour, or devices where none has a price):\n"
    )
    print_rows(choices, _ALTERNATIVES, Format.TABLE)
    sys.stdout.write(f"What {deployment.policy} would do:\n")
    print_rows(changes, _WHAT_IFS, Format.TABLE)


def _alternative(one: Alternative) -> dict[str, object]:
    segment = one.segment
    return {
        "device": segment.device,
        "share": str(segment.share),
        "batch": segment.batch,
        "processes": segment.processes,
        "capacity_rps": segment.capacity_rps,
        "tail_ms": segment.tail_ms,
        "replicas": one.replicas,
        "cost": one.cost,
        "chosen": one.chosen,
    }


def _what_if(one: WhatIf) -> dict[str, object]:
    return {
        "change": one.change,
        "gpus": one.gpus,
        "shares": "; ".join(f"{count} × {share}" for share, count in one.shares) or "none",
        "missing_rps": one.missing_rps,
    }
