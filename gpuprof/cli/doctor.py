"""``gpuprof doctor``: the capabilities of this machine, and a remedy for each missing part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gpuprof
from gpuprof.cli.options import DEFAULT_DB, DbOption
from gpuprof.cli.output import Format, print_rows, print_text
from gpuprof.domain.table import make_columns

if TYPE_CHECKING:
    from gpuprof.machine.doctor import Finding

_FIELDS = make_columns("topic name status detail fix")
_COLUMNS = make_columns("name:what status found:found_→_what_to_do")


def doctor(db: DbOption = DEFAULT_DB, chosen: Format = Format.TABLE) -> None:
    """Print what this machine can do: GPUs, profilers, runtime, cores, disk; nothing is changed."""
    result = gpuprof.doctor(db)
    if chosen is Format.TABLE:
        print_text(f"This machine can {result.verdict()}\n")
        print_rows([_table_row(finding) for finding in result.findings], _COLUMNS, chosen)
    else:
        print_rows(result.rows(), _FIELDS, chosen)


def _table_row(finding: Finding) -> dict[str, object]:
    text = f"{finding.detail}\n→ {finding.fix}" if finding.fix else finding.detail
    return {"name": finding.name, "status": finding.status, "found": text}
