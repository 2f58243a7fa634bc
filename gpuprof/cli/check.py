"""``gpuprof check``: whether a deployment map keeps every rule, whoever made it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.output import Column, CsvOption, Format, JsonOption, chosen_format, print_json, print_rows, say_note
from gpuprof.errors import InfeasibleError

_COLUMNS = (
    Column("rule", "rule", right=False),
    Column("where", "where", right=False),
    Column("message", "what is wrong", right=False),
)


def check(
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map.")] = Path("map.json"),
    against: Annotated[
        Path | None, typer.Option(help="slo.csv to check instead of what the map says was asked.")
    ] = None,
    db: Annotated[Path | None, typer.Option(help="Kernel database.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Check geometry, shares, memory, rates and SLOs of a map; exit 1 when it breaks a rule."""
    from gpuprof.domain.deployment import read_map
    from gpuprof.pipeline.recorded_problem import map_evidence
    from gpuprof.placement.feasibility import check as broken_rules

    chosen = chosen_format(as_json, as_csv)
    deployment = read_map(map_file)
    evidence = map_evidence(deployment, db, against, map_file.absolute().parent, say_note)
    if evidence.estimator is None:
        say_note("there is no kernel database: the times written in the map are believed")
    broken = broken_rules(deployment, evidence)
    rows = [asdict(violation) for violation in broken]
    if chosen is Format.JSON:
        print_json({"map": str(map_file), "sound": not broken, "violations": rows})
    elif rows or chosen is Format.CSV:
        print_rows(rows, _COLUMNS, chosen)
    else:
        replicas = sum(1 for _ in deployment.places())
        sys.stdout.write(f"{map_file} is sound: {replicas} replicas on {deployment.predicted.gpus} devices\n")
    if broken:
        raise InfeasibleError(f"{map_file} breaks {len(broken)} {'rule' if len(broken) == 1 else 'rules'}")
