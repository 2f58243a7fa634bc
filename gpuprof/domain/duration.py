"""Lengths of time as people write them: ``90``, ``60s``, ``250ms``, ``5m``, ``2h``, ``1d``."""

from __future__ import annotations

import re

from gpuprof.errors import InputError

_FORM = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>ms|s|m|min|h|d)?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}
#: Times are kept as whole nanoseconds in 64 bits, which end after 292 years.
LONGEST_S = 100 * 365 * 86400.0


def parse_duration(text: str, what: str = "a duration", least_s: float | None = None) -> float:
    """Return the seconds that ``text`` says; a number without a unit is seconds.

    Raises `InputError` when it has no such form, is shorter than ``least_s`` (None: is zero), or is longer than a
    hundred years.

    Examples
    --------
    >>> parse_duration("250ms"), parse_duration("5m"), parse_duration("90")
    (0.25, 300.0, 90.0)
    """
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        raise InputError(f"cannot read {what} from {text!r}", "write a number and ms, s, m, h or d, as in 60s")
    seconds = float(match["number"]) * _SECONDS[match["unit"]]
    is_long_enough = seconds > 0.0 if least_s is None else seconds >= least_s
    if not is_long_enough or not seconds <= LONGEST_S:
        least = "above 0" if least_s is None else f"at least {least_s:g} s"
        raise InputError(f"{what} must be {least} and at most 100 years but got {text}")
    return seconds
