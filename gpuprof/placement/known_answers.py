"""Caches estimates across the policies that work on a problem.

Policies make many identical queries; where every answer is a prediction, these take longer than the policy itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuprof.domain.estimate import Estimate, Estimator
from gpuprof.errors import InputError

#: A query: the device's name, the workload and its neighbours, in order.
Question = tuple[object, ...]
#: Device, model, share, processes, neighbours and planning confidence.
Series = tuple[object, ...]


@dataclass(slots=True)
class AnswersOfOne:
    """Cached answers of an estimator."""

    estimator: Estimator  #: Kept, so that its id stays unique.
    estimates: dict[Question, Estimate] = field(default_factory=dict)  #: Estimates by query.
    #: Refusals by query.
    refusals: dict[Question, InputError] = field(default_factory=dict)
    #: Planned times of 1, 2, … requests, as far as computed.
    times_ms: dict[Series, list[float]] = field(default_factory=dict)
    #: Reasons why a kind of device serves none of a demand (None where it does), by the demand, the device's name and
    #: the planning settings; the queueing model is kept beside the reason.
    reasons: dict[tuple[object, ...], tuple[object, str | None]] = field(default_factory=dict)


@dataclass(slots=True)
class KnownAnswers:
    """Answers by estimator; a single object serves every policy on the same problem."""

    _of: dict[int, AnswersOfOne] = field(default_factory=dict)

    def of(self, estimator: Estimator) -> AnswersOfOne:
        """Return the cached answers of this estimator object, to be extended."""
        return self._of.setdefault(id(estimator), AnswersOfOne(estimator))
