"""Caches estimates across the policies that work on one problem.

Each policy asks much the same questions; where every answer is a prediction they take longer than the policy itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuprof.domain.estimate import Estimate, Estimator
from gpuprof.errors import InputError

#: A question: the device's name, the workload, those beside it, in order.
Question = tuple[object, ...]
#: Device, model, share, processes, those beside them and the confidence that is planned at.
Series = tuple[object, ...]


@dataclass(slots=True)
class AnswersOfOne:
    """What one estimator said."""

    estimator: Estimator  #: Kept, so that its number stays its own.
    estimates: dict[Question, Estimate] = field(default_factory=dict)  #: By question.
    #: By question, of those that it refused to answer.
    refusals: dict[Question, InputError] = field(default_factory=dict)
    #: Planned times of 1, 2, … requests, as far as they were asked for.
    times_ms: dict[Series, list[float]] = field(default_factory=dict)
    #: Why a kind of device serves none of a demand (None where it does), by the demand, the device's name and what the
    #: demand is judged by, which is kept beside the reason.
    reasons: dict[tuple[object, ...], tuple[object, str | None]] = field(default_factory=dict)


@dataclass(slots=True)
class KnownAnswers:
    """Answers by estimator; one object serves every policy that looks at the same problem."""

    _of: dict[int, AnswersOfOne] = field(default_factory=dict)

    def of(self, estimator: Estimator) -> AnswersOfOne:
        """Return what this very estimator said so far, to be added to."""
        return self._of.setdefault(id(estimator), AnswersOfOne(estimator))
