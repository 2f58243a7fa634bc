"""The contract of estimators, as tests that a plug-in's test suite subclasses.

class TestMyEstimator(EstimatorContract):
    def estimator(self) -> Estimator:
        return MyEstimator()

    model, device = "resnet50", catalogue.device("a100-80")
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Estimator, InterferenceEstimator, Workload, batch_times
from gpuprof.domain.share import Share
from gpuprof.errors import InputError


class EstimatorContract(ABC):
    """Tests of an estimator on ``model`` and ``device``, which subclasses set."""

    model: str
    device: Device

    @abstractmethod
    def estimator(self) -> Estimator:
        """Return the estimator under test."""

    def _workloads(self) -> Iterator[Estimate]:
        estimator = self.estimator()
        for share in estimator.shares(self.model, self.device)[-4:]:
            for batch in estimator.batches(self.model, self.device, share)[:6]:
                yield estimator.estimate(self.model, self.device, batch, share)

    def test_shares_rise_and_end_with_the_whole_device(self) -> None:
        """Policies walk through shares from the smallest on, and the last share must be the device."""
        shares = self.estimator().shares(self.model, self.device)
        fractions = [self.device.fraction(share) for share in shares]
        assert fractions == sorted(fractions) and len(set(shares)) == len(shares)
        assert Share() in shares and fractions[-1] == 1.0

    def test_batches_rise_from_at_least_one(self) -> None:
        """Policies bisect over batches."""
        batches = self.estimator().batches(self.model, self.device, Share())
        assert batches and list(batches) == sorted(set(batches)) and batches[0] >= 1

    def test_an_estimate_says_what_it_is_of(self) -> None:
        """An estimate names the requested workload and device."""
        for workload in self._workloads():
            assert workload.workload.model == self.model and workload.device == self.device.name

    def test_figures_are_positive_and_inside_their_intervals_and_say_their_source(self) -> None:
        """Plans take the upper ends of intervals, and maps record sources."""
        for estimate in self._workloads():
            figures = [estimate.latency_ms, estimate.throughput_rps, *(figure for _, figure in estimate.creq_pct)]
            figures += [
                figure
                for figure in (estimate.memory_bytes, estimate.dram_pct, estimate.l2_pct, estimate.power_w)
                if figure is not None
            ]
            assert estimate.latency_ms.value > 0.0 and estimate.latency_cv >= 0.0
            for figure in figures:
                assert figure.source
                assert math.isfinite(figure.value) and figure.value >= 0.0
                assert figure.low is None or figure.low <= figure.value
                assert figure.high is None or figure.high >= figure.value

    def test_the_same_question_has_the_same_answer(self) -> None:
        """The feasibility check repeats the policy's queries: a different answer would refute its map."""
        batch = self.estimator().batches(self.model, self.device, Share())[0]
        first, second = (self.estimator().estimate(self.model, self.device, batch, Share()) for _ in range(2))
        assert first == second

    def test_times_of_many_batches_are_those_of_each(self) -> None:
        """The times of `batch_times` equal those of `estimate`."""
        estimator, share = self.estimator(), self.estimator().shares(self.model, self.device)[0]
        batches = estimator.batches(self.model, self.device, share)[:6]
        each = [estimator.estimate(self.model, self.device, batch, share).latency_ms for batch in batches]
        assert list(batch_times(self.estimator(), self.model, self.device, batches, share, 1)) == each

    def test_a_neighbour_never_helps(self) -> None:
        """A batch is no faster with a neighbour than alone."""
        estimator = self.estimator()
        batch = estimator.batches(self.model, self.device, Share())[0]
        share = estimator.shares(self.model, self.device)[0]
        alone = estimator.estimate(self.model, self.device, batch, share)
        beside = estimator.estimate(self.model, self.device, batch, share, [Workload(self.model, batch, share)])
        assert beside.latency_ms.value >= alone.latency_ms.value
        assert beside.latency_ms.upper() >= alone.latency_ms.upper()

    def test_no_neighbour_slows_a_part_less_than_the_least_one(self) -> None:
        """Lower bounds of plans assume the neighbours that slow a batch least."""
        estimator, model, device = self.estimator(), self.model, self.device
        if not isinstance(estimator, InterferenceEstimator):
            return
        part = estimator.shares(model, device)[0]
        if part.sm_pct == 100.0:
            part = Share(50.0, part.mig)
        for batch in estimator.batches(model, device, part)[:3]:
            alone = estimator.estimate(model, device, batch, part)
            beside = estimator.estimate(model, device, batch, part, [Workload(model, 1, part)])
            least = estimator.least_beside(model, device, alone.latency_ms)
            assert alone.latency_ms.value <= least.value <= beside.latency_ms.value
            assert alone.latency_ms.upper() <= least.upper() <= beside.latency_ms.upper()

    def test_an_unknown_model_is_an_input_error(self) -> None:
        """The error is the user's, and names the unknown model."""
        assert self._refuses("no-such-model-anywhere", 1), "a model that nobody knows was estimated"

    def test_a_batch_of_nothing_is_an_input_error(self) -> None:
        """No figure is made up for an impossible batch."""
        assert self._refuses(self.model, 0), "a batch of 0 was estimated"

    def _refuses(self, model: str, batch: int) -> bool:
        try:
            self.estimator().estimate(model, self.device, batch, Share())
        except InputError:
            return True
        return False
