"""Options that are lengths of time: ``3``, ``500ms``, ``2m``; a number alone is in the option's own unit."""

from __future__ import annotations

from typing import Any

import typer

from gpuprof.domain.duration import LONGEST_S, parse_duration


def duration_option(
    name: str, help_text: str, *, least_s: float | None = None, most_s: float = LONGEST_S, unit: str = "s"
) -> Any:
    """Return an option whose value is a number of ``unit``.

    ``name``: as on the command line, for messages; ``least_s``, ``most_s``: as `parse_duration` takes them.
    """

    def parse_given(given: str | float) -> float:
        # Defaults come here as well.
        return parse_duration(str(given), name, least_s, most_s=most_s, unit=unit)

    return typer.Option(parser=parse_given, metavar="TIME", help=help_text)
