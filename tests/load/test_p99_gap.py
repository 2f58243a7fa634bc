"""Where p99 came out other than predicted."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.planned_with import PlannedWith, RecordedHostWork
from gpuprof.load.client import Schedule, SentRequests
from gpuprof.load.p99_gap import AnsweredRequests, P99Gap, divide_p99_gap, select_answered
from gpuprof.serving.transport.server_timing import UNKNOWN_MS
from tests.simulator.maps import make_map, replica

HANDOVER_MS, OVERHEAD_MS = 0.5, 1.25
COUNT = 400
#: 100 requests a second: those of one process wait only behind slow ones.
DUE_MS = 10.0 * np.arange(COUNT, dtype=np.float64)


def planned(processes: int = 1, batch: int = 1, turns: int = 0) -> DeploymentMap:
    one = replica("m", [4.0] * batch, processes=processes).model_copy(update={"turns": turns})
    host = RecordedHostWork(handover_ms=HANDOVER_MS)
    return make_map([[one]]).model_copy(update={"planned_with": PlannedWith(overhead_ms=OVERHEAD_MS, host=host)})


def answered(infer_ms: np.ndarray, late_ms: float | np.ndarray = 0.0) -> AnsweredRequests:
    return AnsweredRequests(DUE_MS, DUE_MS + late_ms, infer_ms, np.ones(COUNT, bool))


def slow_first(count: int, slow_ms: float, usual_ms: float = 4.0) -> np.ndarray:
    times = np.full(COUNT, usual_ms)
    times[:: COUNT // count] = slow_ms
    return times


def test_slow_batches_are_told_with_the_wait_that_they_cause() -> None:
    # Ten of 400 take 24.5 ms with the handover: the next waits for 14.5, the one after it for 9.
    gap = divide_p99_gap(planned(), "m", answered(slow_first(10, 24.0)), predicted_ms=6.0, measured_ms=27.0)
    assert gap is not None
    assert gap.batches_ms == pytest.approx(24.5 + OVERHEAD_MS - 6.0)
    assert gap.late_ms == 0.0
    assert gap.rest_ms == pytest.approx(27.0 - 24.5 - OVERHEAD_MS)


def test_more_processes_wait_less() -> None:
    # Of ten at once, each 4.5 ms: one process is done with the last after 45 ms, two after 22.5.
    at_once = AnsweredRequests(np.zeros(10), np.zeros(10), np.full(10, 4.0), np.arange(10) == 9)
    ends_ms = [
        gap.batches_ms - OVERHEAD_MS
        for processes in (1, 2)
        if (gap := divide_p99_gap(planned(processes), "m", at_once, 0.0, 50.0)) is not None
    ]
    assert ends_ms == pytest.approx([45.0, 22.5])


def test_what_the_client_sent_late_is_a_part_of_its_own() -> None:
    late_ms = np.where(np.arange(COUNT) % 40 == 0, 5.0, 0.0)
    gap = divide_p99_gap(planned(), "m", answered(np.full(COUNT, 4.0), late_ms), predicted_ms=6.0, measured_ms=12.0)
    assert gap is not None
    assert gap.batches_ms == pytest.approx(4.5 + OVERHEAD_MS - 6.0)
    assert gap.late_ms == pytest.approx(5.0)
    assert gap.batches_ms + gap.late_ms + gap.rest_ms == pytest.approx(12.0 - 6.0)


def test_requests_of_the_warm_up_delay_others_and_are_not_counted() -> None:
    seen = AnsweredRequests(
        np.array([0.0, 10.0]), np.array([0.0, 10.0]), np.array([99.0, 4.0]), np.array([False, True])
    )
    gap = divide_p99_gap(planned(), "m", seen, 0.0, 0.0)
    assert gap is not None
    assert gap.batches_ms == pytest.approx(99.5 + 4.5 - 10.0 + OVERHEAD_MS)


@pytest.mark.parametrize(("batch", "turns"), [(2, 0), (1, 1)])
def test_nothing_is_said_of_requests_that_share_batches_or_take_turns(batch: int, turns: int) -> None:
    assert divide_p99_gap(planned(1, batch, turns), "m", answered(np.full(COUNT, 4.0)), 6.0, 9.0) is None


def test_nothing_is_said_where_the_server_does_not_tell_the_model_s_time_or_nothing_was_answered() -> None:
    untold = np.full(COUNT, 4.0)
    untold[7] = UNKNOWN_MS
    assert divide_p99_gap(planned(), "m", answered(untold), 6.0, 9.0) is None
    nothing = AnsweredRequests(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, bool))
    assert divide_p99_gap(planned(), "m", nothing, 6.0, 9.0) is None


def test_refused_requests_and_those_of_other_models_are_left_out() -> None:
    schedule = Schedule("host", 1, ((b"",), (b"",)), times=[0.5, 1.0, 1.5, 2.0], models=[0, 1, 0, 0])
    told = array("d", [1.0, 2.0, 3.0, 4.0])
    sent = SentRequests(
        array("d", [0.6, 1.0, 1.5, 2.25]), array("d", [1.0] * 4), array("h", [200, 200, 503, 200]), infer_ms=told
    )
    sent.server_ms = sent.queue_ms = told
    seen = select_answered([schedule], [sent], 0, (1.0, 3.0))
    assert seen.due_ms.tolist() == [500.0, 2000.0]
    assert seen.sent_ms.tolist() == [600.0, 2250.0]
    assert seen.infer_ms.tolist() == [1.0, 4.0]
    assert seen.is_counted.tolist() == [False, True]


def test_a_gap_is_told_by_its_parts_with_their_signs() -> None:
    assert str(P99Gap(2.94, 1.0, -0.26)) == (
        "+2.9 ms by the times of its batches, +1.0 ms sent late, -0.3 ms in the network and the router"
    )
