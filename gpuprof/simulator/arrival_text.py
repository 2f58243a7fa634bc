"""Arrival processes as people write them: ``poisson``, ``gamma:4``, ``bursts:5,2s,8s``, ``diurnal:4,24h``."""

from __future__ import annotations

import math

from gpuprof.errors import InputError, unknown_name
from gpuprof.simulator.arrivals import Arriving, Bursts, Constant, Diurnal, Gamma
from gpuprof.simulator.duration import parse_duration

FORMS = {
    "constant": "constant",
    "poisson": "poisson",
    "gamma": "gamma:SCV, as in gamma:4",
    "bursts": "bursts:RATIO,BURST,CALM, as in bursts:5,2s,8s",
    "diurnal": "diurnal:PEAK_TO_TROUGH,PERIOD, as in diurnal:4,24h",
}


def parse_arrivals(text: str, rate_rps: float) -> Arriving:
    """Return the process that ``text`` describes, at a mean of ``rate_rps``; what is left out has its default.

    Raises
    ------
    InputError
        For an unknown process, too many parameters, or one outside its range.
    """
    if not 0.0 < rate_rps <= 1e9:
        raise InputError(f"a rate must be above 0 and at most 1e9 requests/s but got {rate_rps:g}")
    name, _, rest = text.strip().lower().partition(":")
    if name not in FORMS:
        raise unknown_name("arrival process", name, sorted(FORMS))
    given = [word.strip() for word in rest.split(",")] if rest else []
    if len(given) > {"gamma": 1, "bursts": 3, "diurnal": 2}.get(name, 0):
        raise InputError(f"too many parameters in {text!r}", f"write {FORMS[name]}")
    return _build(name, given, rate_rps)


def _build(name: str, given: list[str], rate_rps: float) -> Arriving:
    if name == "constant":
        return Constant(rate_rps)
    if name == "poisson":
        return Gamma(rate_rps)
    if name == "gamma":
        return Gamma(rate_rps, *(_number(word, "the SCV", 1e-6, 1e4) for word in given))
    lengths = [parse_duration(word) for word in given[1:]]
    if name == "bursts":
        return Bursts(rate_rps, *(_number(word, "the ratio", 1.0, 1e6) for word in given[:1]), *lengths)
    return Diurnal(rate_rps, *(_number(word, "peak to trough", 1.0, 1e6) for word in given[:1]), *lengths)


def _number(text: str, what: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{what} must be a number but got {text!r}") from None
    if not math.isfinite(value) or not low <= value <= high:
        raise InputError(f"{what} must lie in [{low:g}, {high:g}] but got {text}")
    return value
