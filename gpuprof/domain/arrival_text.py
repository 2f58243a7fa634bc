"""Parses arrival processes: ``poisson``, ``gamma:4``, ``batch:8``, ``mmpp:3,2s``, ``diurnal:4,24h``."""

from __future__ import annotations

import math
from collections.abc import Callable

from gpuprof.domain.arrival_process import (
    ArrivalProcess,
    BatchPoissonArrivals,
    DeterministicArrivals,
    DiurnalArrivals,
    GammaArrivals,
    HyperexponentialArrivals,
    LognormalArrivals,
    MmppArrivals,
    mmpp_with_peaks,
)
from gpuprof.domain.duration import parse_duration
from gpuprof.errors import InputError, unknown_name

FORMS = {
    "constant": "constant",
    "poisson": "poisson",
    "gamma": "gamma:SCV, as in gamma:4",
    "lognormal": "lognormal:SCV, as in lognormal:4",
    "hyperexponential": "hyperexponential:SCV, as in hyperexponential:4",
    "batch": "batch:SIZE, as in batch:8",
    "mmpp": "mmpp:PEAK_TO_MEAN,WINDOW, as in mmpp:3,2s",
    "bursts": "bursts:RATIO,BURST,CALM, as in bursts:5,2s,8s",
    "diurnal": "diurnal:PEAK_TO_TROUGH,PERIOD, as in diurnal:4,24h",
}
_MOST_GIVEN = {"gamma": 1, "lognormal": 1, "hyperexponential": 1, "batch": 1, "mmpp": 2, "bursts": 3, "diurnal": 2}
_RENEWALS: dict[str, Callable[..., ArrivalProcess]] = {
    "gamma": GammaArrivals,
    "lognormal": LognormalArrivals,
    "hyperexponential": HyperexponentialArrivals,
}


def parse_arrivals(text: str, rate_rps: float) -> ArrivalProcess:
    """Return the process described by ``text`` at a mean of ``rate_rps``; omitted parameters have their defaults.

    Raises `InputError` for an unknown process, too many parameters, or a parameter outside its range.

    Examples
    --------
    >>> parse_arrivals("poisson", 50.0)
    GammaArrivals(rate_rps=50.0, scv=1.0)
    >>> parse_arrivals("mmpp:3,2s", 100.0)  # bursts of 2 s on average at three times the mean rate
    MmppArrivals(rate_rps=100.0, ratio=5.0, burst_s=2.0, calm_s=10.0)
    """
    if not 0.0 < rate_rps <= 1e9:
        raise InputError(f"a rate must be above 0 and at most 1e9 requests/s but got {rate_rps:g}")
    name, _, arguments = text.strip().lower().partition(":")
    if name not in FORMS:
        raise unknown_name("arrival process", name, sorted(FORMS))
    words = [word.strip() for word in arguments.split(",")] if arguments else []
    if len(words) > _MOST_GIVEN.get(name, 0):
        raise InputError(f"too many parameters in {text!r}", f"write {FORMS[name]}")
    return _build_process(name, words, rate_rps)


def _build_process(name: str, words: list[str], rate_rps: float) -> ArrivalProcess:
    if name == "constant":
        return DeterministicArrivals(rate_rps)
    if name == "poisson":
        return GammaArrivals(rate_rps)
    if name in _RENEWALS:
        # The SCV of a mixture of exponential gaps is at least 1.
        least = 1.0 if name == "hyperexponential" else 1e-6
        return _RENEWALS[name](rate_rps, *(_parse_number(word, "the SCV", least, 1e4) for word in words))
    if name == "batch":
        return BatchPoissonArrivals(rate_rps, *(_parse_count(word, "the size") for word in words))
    lengths = [parse_duration(word) for word in words[1:]]
    if name == "mmpp":
        peak = _parse_number(words[0], "peak to mean", 1.0, 1e6) if words else 3.0
        return mmpp_with_peaks(rate_rps, peak, lengths[0] if lengths else 1.0)
    if name == "bursts":
        return MmppArrivals(rate_rps, *(_parse_number(word, "the ratio", 1.0, 1e6) for word in words[:1]), *lengths)
    return DiurnalArrivals(rate_rps, *(_parse_number(word, "peak to trough", 1.0, 1e6) for word in words[:1]), *lengths)


def _parse_count(text: str, name: str) -> int:
    value = _parse_number(text, name, 1.0, 1e6)
    if value != int(value):
        raise InputError(f"{name} must be a whole number but got {text}")
    return int(value)


def _parse_number(text: str, name: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{name} must be a number but got {text!r}") from None
    if not math.isfinite(value) or not low <= value <= high:
        raise InputError(f"{name} must lie in [{low:g}, {high:g}] but got {text}")
    return value
