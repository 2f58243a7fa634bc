"""Measures in windows until several in a row agree, as perf_analyzer does."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WindowRule:
    """When a load has been measured."""

    window_s: float = 5.0  #: Length of a window.
    #: Tolerance of agreement: largest deviation from the windows' mean, in rate and mean latency of every model.
    percent: float = 10.0
    most: int = 10  #: Number of windows after which the load ends without agreement.
    count: int = 3  #: Consecutive windows that must agree and that count. perf_analyzer has 3.

    @property
    def longest_s(self) -> float:
        """The time of all windows."""
        return self.window_s * self.most


@dataclass(slots=True)
class WindowWatch:
    """Counts answers by window and detects agreement of windows."""

    rule: WindowRule
    models: int
    begin_s: float  #: Start of the first window: earlier answers do not count.
    is_stable: bool = False
    finished: int = 0
    _counts: list[int] = field(init=False)
    _sums_s: list[float] = field(init=False)
    _windows: list[tuple[tuple[float, float], ...]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._counts, self._sums_s = [0] * self.models, [0.0] * self.models

    @property
    def end_s(self) -> float:
        """When the last finished window ended."""
        return self.begin_s + self.finished * self.rule.window_s

    def add(self, model: int, latency_s: float, now_s: float) -> None:
        """Count an answer."""
        if now_s >= self.begin_s:
            self._counts[model] += 1
            self._sums_s[model] += latency_s

    def is_over(self, now_s: float) -> bool:
        """Tell whether the last windows agree, or the maximum number of windows has passed."""
        while not self._is_done() and now_s >= self.end_s + self.rule.window_s:
            self.finished += 1
            self._windows.append(
                tuple(
                    (count, total / count if count else 0.0)
                    for count, total in zip(self._counts, self._sums_s, strict=True)
                )
            )
            self._reset()
            self.is_stable = self._agree()
        return self._is_done()

    def _is_done(self) -> bool:
        return self.is_stable or self.finished >= self.rule.most

    def _agree(self) -> bool:
        last = self._windows[-self.rule.count :]
        if len(last) < self.rule.count:
            return False
        columns = [[window[model][part] for window in last] for model in range(self.models) for part in (0, 1)]
        tolerance = self.rule.percent / 100.0
        means = [sum(values) / len(values) for values in columns]
        return all(
            mean > 0.0 and all(abs(value - mean) <= tolerance * mean for value in values)
            for values, mean in zip(columns, means, strict=True)
        )
