"""Parses durations: ``90``, ``60s``, ``250ms``, ``5m``, ``2h``, ``1d``."""

from __future__ import annotations

import re

from gpuprof.errors import InputError

_FORM = re.compile(r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*(?P<unit>ms|s|m|min|h|d)?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
#: Times are whole nanoseconds in 64 bits, whose range ends after 292 years.
LONGEST_S = 100 * 365 * 86400.0


def parse_duration(
    text: str,
    what: str = "a duration",
    least_s: float | None = None,
    *,
    most_s: float = LONGEST_S,
    unit: str = "s",
) -> float:
    """Return the duration written in ``text``, in ``unit``; a number alone is in that unit.

    Raises `InputError` when the text has another form, or the duration is shorter than ``least_s`` (None: is zero) or
    longer than ``most_s``.

    Examples
    --------
    >>> parse_duration("250ms"), parse_duration("5m"), parse_duration("90")
    (0.25, 300.0, 90.0)
    >>> parse_duration("0.7", unit="ms"), parse_duration("2s", unit="ms")
    (0.7, 2000.0)
    """
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        raise InputError(f"cannot read {what} from {text!r}", f"write a number and ms, s, m, h or d, as in 60{unit}")
    number, of_text = float(match["number"]), _SECONDS[match["unit"] or unit]
    seconds = number * of_text
    is_long_enough = seconds > 0.0 if least_s is None else seconds >= least_s
    if not is_long_enough or not seconds <= most_s:
        least_text = "above 0" if least_s is None else f"at least {least_s:g} s"
        most_text = "100 years" if most_s == LONGEST_S else f"{most_s:g} s"
        raise InputError(f"{what} must be {least_text} and at most {most_text} but got {text}")
    return number * (of_text / _SECONDS[unit])
