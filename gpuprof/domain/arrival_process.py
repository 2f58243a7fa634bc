"""Arrival processes: streams of request times, generated in pieces, and their texts (``"gamma:4"``).

A process is a description with a mean rate; `ArrivalProcess.stream` yields its times in whole nanoseconds from 0 on.
Only the piece being taken is in memory, however long the stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.validation import LARGEST, parse_duration
from gpuprof.errors import InputError, unknown_name

Times = NDArray[np.int64]
Floats = NDArray[np.float64]

NS_PER_S = 1e9
#: Points at which the integrated rate of a day is tabulated for interpolation.
_PROFILE_POINTS = 4096
#: Last time in nanoseconds: within int64, and beyond the longest accepted duration.
_FURTHEST = np.iinfo(np.int64).max / 2
#: Stays of a process with states that are drawn together.
_STAYS = 1024


class ArrivalStream(Protocol):
    """Times of requests, ascending."""

    def take(self, count: int) -> Times:
        """Return the next ``count`` times in nanoseconds; fewer, then none, at the end of the stream."""


class ArrivalProcess(Protocol):
    """An arrival process."""

    @property
    def rate_rps(self) -> float:
        """Mean rate in requests per second."""

    def stream(self, random: np.random.Generator) -> ArrivalStream:
        """Return a new stream of times, drawn from ``random``."""


@dataclass(frozen=True, slots=True)
class DeterministicArrivals:
    """Requests every ``1 / rate_rps`` seconds, the first after a gap."""

    rate_rps: float

    def stream(self, random: np.random.Generator) -> ArrivalStream:
        """Return the times, which are not random."""
        gap = NS_PER_S / self.rate_rps
        return _IndexedStream(lambda begin, end: _round_times(np.rint(np.arange(begin + 1, end + 1) * gap)))


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Independent gaps of a gamma distribution with squared coefficient of variation ``scv``; 1 is Poisson."""

    rate_rps: float
    scv: float = 1.0

    def stream(self, random: np.random.Generator) -> ArrivalStream:
        """Return the times."""
        gap = NS_PER_S / self.rate_rps
        if self.scv == 1.0:
            return _RenewalStream(lambda count: gap * random.standard_exponential(count))
        return _RenewalStream(lambda count: gap * self.scv * random.standard_gamma(1.0 / self.scv, count))


@dataclass(frozen=True, slots=True)
class BatchPoissonArrivals:
    """A batch Poisson process: groups of ``size`` simultaneous requests, whose arrivals are a Poisson process."""

    rate_rps: float
    size: int = 4

    def stream(self, random: np.random.Generator) -> ArrivalStream:
        """Return the times."""
        gap = NS_PER_S * self.size / self.rate_rps
        return _BatchStream(_RenewalStream(lambda count: gap * random.standard_exponential(count)), self.size)


@dataclass(frozen=True, slots=True)
class MmppArrivals:
    """A Markov-modulated Poisson process of two states, calm and burst."""

    rate_rps: float  #: Mean over both states.
    ratio: float = 5.0  #: Rate in a burst over the rate in the calm.
    #: ``burst_s``, ``calm_s``: Mean times in the states, exponentially distributed.
    burst_s: float = 2.0
    calm_s: float = 8.0

    def stream(self, random: np.random.Generator) -> ArrivalStream:
        """Return the times; the first state is drawn in proportion to the mean durations of the states."""
        mean = (self.ratio * self.burst_s + self.calm_s) / (self.burst_s + self.calm_s)
        calm = self.rate_rps / mean / NS_PER_S
        state = int(random.random() * (self.burst_s + self.calm_s) < self.burst_s)
        clock = _MmppClock(random, (calm, calm * self.ratio), (self.calm_s * NS_PER_S, self.burst_s * NS_PER_S), state)
        return _RenewalStream(random.standard_exponential, clock.time_of)


@dataclass(frozen=True, slots=True)
class DiurnalArrivals:
    """A Poisson process whose rate follows a sine: least at the start of each period, most in its middle."""

    rate_rps: float  #: Mean over a period.
    peak_to_trough: float = 4.0  #: Highest over lowest rate.
    period_s: float = 86400.0

    def stream(self, random: np.random.Generator) -> ArrivalStream:
        """Return the times."""
        swing = (self.peak_to_trough - 1.0) / (self.peak_to_trough + 1.0)
        period = self.period_s * NS_PER_S
        phase = np.linspace(0.0, 1.0, _PROFILE_POINTS + 1)
        # The integral of 1 - swing·cos(2π·phase), in periods: the fraction of the load that arrives before each phase.
        load = phase - swing * np.sin(2.0 * np.pi * phase) / (2.0 * np.pi)
        expected = self.rate_rps * self.period_s

        def time_of(events: Floats) -> Floats:
            """Return the times in ns at which the expected number of events reaches ``events`` (ascending)."""
            periods, part = np.divmod(events / expected, 1.0)
            return np.asarray(period * (periods + np.interp(part, load, phase)))

        return _RenewalStream(random.standard_exponential, time_of)


# The generated __eq__ would compare arrays, and an array of truth values is neither true nor false.
@dataclass(frozen=True, slots=True, eq=False)
class RecordedArrivals:
    """Recorded times, replayed unchanged: an ndarray of shape (requests,), ascending, in nanoseconds."""

    times: Times
    duration_s: float

    def __eq__(self, other: object) -> bool:
        """Return whether the other object is a recording of the same times."""
        if not isinstance(other, RecordedArrivals):
            return NotImplemented
        return self.duration_s == other.duration_s and np.array_equal(self.times, other.times)

    def __hash__(self) -> int:
        # A recording may hold a billion times: the ends distinguish most recordings, and __eq__ compares all times.
        return hash((self.duration_s, len(self.times), *self.times[:4].tolist(), *self.times[-4:].tolist()))

    @property
    def rate_rps(self) -> float:
        """Mean rate over the recording."""
        return len(self.times) / self.duration_s

    def stream(self, random: np.random.Generator) -> ArrivalStream:
        """Return the recorded times, which are not random."""
        return _IndexedStream(lambda begin, end: self.times[begin:end])


def scale_to_rate(process: ArrivalProcess, rate_rps: float) -> ArrivalProcess:
    """Return the process at another mean rate: recordings are played faster or slower, others keep their shape."""
    if isinstance(process, RecordedArrivals):
        scale = process.rate_rps / rate_rps
        return RecordedArrivals(_round_times(np.rint(process.times * scale)), process.duration_s * scale)
    return replace(process, rate_rps=rate_rps)  # type: ignore[type-var]


def _round_times(times: Floats) -> Times:
    """Return times as integers, capped at `_FURTHEST` to stay within int64."""
    return np.minimum(times, _FURTHEST).astype(np.int64)


class _IndexedStream:
    """Times computed from their index in the stream: a running sum of a fixed gap would drift."""

    def __init__(self, times_between: Callable[[int, int], Times]) -> None:
        self._times_between = times_between
        self._position = 0

    def take(self, count: int) -> Times:
        """Return the next ``count`` times, in nanoseconds."""
        piece = self._times_between(self._position, self._position + count)
        self._position += len(piece)
        return piece


class _RenewalStream:
    """Running sum of gaps, mapped to time by ``time_of``; the fraction of the last nanosecond is kept."""

    def __init__(self, gaps: Callable[[int], Floats], time_of: Callable[[Floats], Floats] | None = None) -> None:
        self._gaps, self._time_of = gaps, time_of
        self._last = 0.0

    def take(self, count: int) -> Times:
        """Return the next ``count`` times, in nanoseconds."""
        sums = self._last + np.cumsum(self._gaps(count))
        if count:
            self._last = float(sums[-1])
        return _round_times(sums if self._time_of is None else self._time_of(sums))


class _BatchStream:
    """Repeats each time of a stream ``size`` times."""

    def __init__(self, stream: ArrivalStream, size: int) -> None:
        self._stream, self._size = stream, size
        self._left = np.zeros(0, np.int64)

    def take(self, count: int) -> Times:
        """Return the next ``count`` times, in nanoseconds."""
        groups = max(0, math.ceil((count - len(self._left)) / self._size))
        times = np.concatenate([self._left, np.repeat(self._stream.take(groups), self._size)])
        self._left = times[count:]
        return times[:count]


class _MmppClock:
    """Maps expected events to time under a rate that switches between two values at random times."""

    def __init__(
        self, random: np.random.Generator, rates: tuple[float, float], stays: tuple[float, float], state: int
    ) -> None:
        self._random = random
        self._rates, self._stays, self._state = rates, stays, state
        self._times, self._events = np.zeros(1), np.zeros(1)

    def time_of(self, events: Floats) -> Floats:
        """Return the times in ns at which the expected number of events reaches ``events`` (ascending)."""
        times, count = np.empty(len(events)), 0
        while count < len(events):
            while self._events[-1] <= events[count] and self._times[-1] < _FURTHEST:
                self._skip_cycles(events[count])
                self._add_stays(self._random.standard_exponential(_STAYS))
            upto = len(events)
            if self._times[-1] < _FURTHEST:
                upto = int(np.searchsorted(events, self._events[-1]))
            times[count:upto] = np.interp(events[count:upto], self._events, self._times)
            count = upto
            keep = int(np.searchsorted(self._events, events[count - 1], side="right")) - 1
            self._times, self._events = self._times[keep:], self._events[keep:]
        return times

    def _skip_cycles(self, event: float) -> None:
        """Skip the cycles within a gap in one draw: a sum of exponential durations is gamma distributed."""
        cycle = sum(rate * stay for rate, stay in zip(self._rates, self._stays, strict=True))
        cycles = (event - self._events[-1]) / cycle
        self._times, self._events = self._times[-1:], self._events[-1:]
        if cycles > _STAYS:
            whole_cycles = int(cycles - 8.0 * math.sqrt(cycles))  # fewer cycles practically never hold so many events
            durations = [stay * self._random.standard_gamma(whole_cycles) for stay in self._stays]
            self._times = self._times + sum(durations)
            self._events = self._events + sum(rate * stay for rate, stay in zip(self._rates, durations, strict=True))

    def _add_stays(self, stays: Floats) -> None:
        """Append durations of alternating states; ``stays`` are multiples of each state's mean duration."""
        states = (self._state + np.arange(len(stays))) % 2
        durations = np.array(self._stays)[states] * stays
        expected = np.array(self._rates)[states] * durations
        self._times = np.append(self._times, self._times[-1] + np.cumsum(durations))
        self._events = np.append(self._events, self._events[-1] + np.cumsum(expected))
        self._state = (self._state + len(stays)) % 2


FORMS = {
    "constant": "constant",
    "poisson": "poisson",
    "gamma": "gamma:SCV, as in gamma:4",
    "batch": "batch:SIZE, as in batch:8",
    "bursts": "bursts:RATIO,BURST,CALM, as in bursts:5,2s,8s",
    "diurnal": "diurnal:PEAK_TO_TROUGH,PERIOD, as in diurnal:4,24h",
}
_MOST_GIVEN = {"gamma": 1, "batch": 1, "bursts": 3, "diurnal": 2}


def parse_arrivals(text: str, rate_rps: float) -> ArrivalProcess:
    """Return the process described by ``text`` at a mean of ``rate_rps``; omitted parameters have their defaults.

    Raises `InputError` for an unknown process, too many parameters, or a parameter outside its range.

    Examples
    --------
    >>> parse_arrivals("poisson", 50.0)
    GammaArrivals(rate_rps=50.0, scv=1.0)
    >>> parse_arrivals("bursts:5,2s,10s", 100.0)
    MmppArrivals(rate_rps=100.0, ratio=5.0, burst_s=2.0, calm_s=10.0)
    """
    if not 0.0 < rate_rps <= LARGEST:
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
    if name == "gamma":
        return GammaArrivals(rate_rps, *(_parse_number(word, "the SCV", 1e-6, 1e4) for word in words))
    if name == "batch":
        return BatchPoissonArrivals(rate_rps, *(_parse_count(word, "the size") for word in words))
    lengths = [parse_duration(word) for word in words[1:]]
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
