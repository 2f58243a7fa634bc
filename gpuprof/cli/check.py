"""``gpuprof check``: whether a deployment map, from any tool, keeps every rule."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuprof.cli.options import MapFileArgument
from gpuprof.cli.output import Format, make_columns, print_json, print_rows, say_note
from gpuprof.domain.plural import count_of
from gpuprof.pipeline.check import CheckOptions

_COLUMNS = make_columns("rule where times message:what_is_wrong")


def check(
    options: CheckOptions,
    map_file: MapFileArgument = Path("map.json"),
    chosen: Format = Format.TABLE,
) -> None:
    """Check geometry, shares, memory, rates and SLOs of a map; exit 1 when it breaks a rule."""
    from gpuprof.domain.map_sources import record_basis
    from gpuprof.pipeline.check import check as check_map

    result = check_map(map_file, options, note=say_note)
    rows = result.rows()
    if chosen is Format.JSON:
        basis = record_basis(result.deployment)
        print_json({"map": str(map_file), "sound": result.is_sound, "basis": basis, "violations": rows})
    elif chosen is Format.CSV:
        print_rows(rows, _COLUMNS, chosen)
    elif rows:
        print_rows(group_equal(rows), _COLUMNS, chosen)
    else:
        replicas = sum(1 for _ in result.deployment.places())
        devices = count_of(result.deployment.predicted.gpus, "device")
        sys.stdout.write(f"{map_file} is sound: {count_of(replicas, 'replica')} on {devices}\n")
    result.raise_if_broken()


def group_equal(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return a row for each rule and message, with the places of the fault and their number."""
    places: dict[tuple[object, object], list[str]] = {}
    for row in rows:
        places.setdefault((row["rule"], row["message"]), []).append(str(row["where"]))
    return [
        {"rule": rule, "where": ", ".join(dict.fromkeys(where)), "times": len(where), "message": message}
        for (rule, message), where in places.items()
    ]
