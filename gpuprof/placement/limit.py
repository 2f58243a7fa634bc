"""Time limits of searches, their end by Ctrl-C, and the report of an early end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.plural import count_of
from gpuprof.machine.machine_code import working_cpu_s, working_s
from gpuprof.placement.placement import Placement

#: Maximum seconds for each granted second of processor time; waiting uses no processor time.
_MOST_WAITED = 5.0
#: Map entries for the causes of an early stop.
_STOPPED, _INTERRUPTED = "time limit", "interrupt"


class TimeUpError(Exception):
    """The time is up. The caller that set the limit catches it and returns the best result so far."""


_interrupted = threading.Event()


def is_interrupted() -> bool:
    """Return whether Ctrl-C ended the searches inside `interruptible`."""
    return _interrupted.is_set()


def end_searches(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: end every search, and let the next Ctrl-C interrupt the program."""
    _interrupted.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end every limit of some seconds within the context, so that searches return their best map.

    A second Ctrl-C interrupts the program. Without effect outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    if before is signal.default_int_handler:  # an ignored signal, or somebody else's handler, stays
        signal.signal(signal.SIGINT, end_searches)
    try:
        yield
    finally:
        _interrupted.clear()
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class Limit:
    """A time limit that runs from its creation."""

    #: None: no limit; searches then stop by counts, so that the same problem has the same result everywhere.
    seconds: float | None = None
    _started: float = field(default_factory=working_s, compare=False)
    #: Minimum processor time, within five times as many seconds: where other programs occupy the processors, the clock
    #: would end a search before its start.
    least_cpu_s: float = 0.0
    _least_started: tuple[float, float] = field(default=(0.0, 0.0), compare=False)

    @property
    def left_s(self) -> float | None:
        """Seconds left, at least 0.001; None without a limit."""
        if self.seconds is None:
            return None
        if is_interrupted():
            return 1e-3
        return max(1e-3, self._started + self.seconds - working_s(), self._least_left_s)

    @property
    def is_over(self) -> bool:
        """Return whether the time is up, or the search was interrupted."""
        if self.seconds is None:
            return False
        return is_interrupted() or (working_s() - self._started >= self.seconds and self._least_left_s <= 0.0)

    @property
    def _least_left_s(self) -> float:
        if self.least_cpu_s <= 0.0:
            return 0.0
        clock, cpu = self._least_started
        return min(self.least_cpu_s - (working_cpu_s() - cpu), _MOST_WAITED * self.least_cpu_s - (working_s() - clock))

    def with_least(self, cpu_s: float) -> Limit:
        """Return the limit, extended until the process has used ``cpu_s`` of processor time from now on."""
        return (
            self
            if self.seconds is None
            else replace(self, least_cpu_s=cpu_s, _least_started=(working_s(), working_cpu_s()))
        )

    def keeping(self, seconds: float) -> Limit:
        """Return a limit that ends ``seconds`` earlier, with a proportional part of the processor time."""
        if not self.seconds:
            return self
        left = self.seconds - seconds
        return replace(self, seconds=left, least_cpu_s=max(0.0, self.least_cpu_s * left / self.seconds))


def name_stop(placement: Placement) -> str | None:
    """Return the reason for a search's early end; None if it ended by itself."""
    if not placement.stopped:
        return None
    return _INTERRUPTED if is_interrupted() else _STOPPED


def early_stop(deployment: DeploymentMap, limit_s: float | None = None) -> str | None:
    """Return a line for a search that was stopped early, None otherwise.

    ``limit_s``: the time limit in seconds, printed with its option.
    """
    if (stop := deployment.planned_with.stopped_by) is None:
        return None
    predicted, words = deployment.predicted, []
    if predicted.lower_bound_gpus is not None:
        is_least = predicted.gpus <= predicted.lower_bound_gpus
        bound = (
            "the least that any map takes" if is_least else f"and no map takes fewer than {predicted.lower_bound_gpus}"
        )
        words.append(f"{count_of(predicted.gpus, 'device')}, {bound}")
    if predicted.lower_bound_cost_per_hour is not None and predicted.cost_per_hour is not None:
        words.append(
            f"{predicted.cost_per_hour:.4g} $/h, and none costs less than {predicted.lower_bound_cost_per_hour:.4g}"
        )
    if predicted.upper_bound_goodput_rps is not None:
        words.append(
            f"{predicted.goodput_rps:.4g} requests/s, and none serves more than {predicted.upper_bound_goodput_rps:.4g}"
        )
    result = "; ".join(words) or "no bound is known"
    if limit_s is None or stop == _INTERRUPTED:
        return f"the {stop} ended the search early: {result}"
    return f"the {stop} of {limit_s:g} s ended the search early (--time-limit gives it longer): {result}"
