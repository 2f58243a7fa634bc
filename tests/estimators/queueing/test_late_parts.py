from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.sojourn import Arrivals, BatchServer, QuickQueueModel
from gpuprof.estimators.queueing.queueing import BatchQueue


def _server(batch: int, start: float, power: float, overhead: float = 0.0) -> BatchServer:
    return BatchServer(tuple(start + n**power for n in range(1, batch + 1)), batch, 0.0, overhead_ms=overhead)


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 24),
    start=st.floats(0.2, 20.0),
    power=st.floats(0.5, 1.0),
    load=st.floats(0.1, 0.95),
    overhead=st.sampled_from([0.0, 3.0]),
)
def test_late_parts_tell_on_which_side_of_the_percentile_a_limit_is(
    batch: int, start: float, power: float, load: float, overhead: float
) -> None:
    server = _server(batch, start, power, overhead)
    rate = load * server.capacity_rps
    tail = BatchQueue().sojourn(Arrivals(rate), server).percentile(99.0)
    late = BatchQueue().late_parts(rate, server, [0.988 * tail, 1.012 * tail])
    assert late is not None
    assert late[1] <= 0.011 and late[0] >= 0.009


@pytest.mark.parametrize("batch", [100, 200])
@pytest.mark.parametrize("load", [0.5, 0.75, 0.95])
def test_late_parts_of_large_batches_tell_it_too(batch: int, load: float) -> None:
    server = _server(batch, 40.0, 1.0)
    rate = load * server.capacity_rps
    tail = BatchQueue().sojourn(Arrivals(rate), server).percentile(99.0)
    late = BatchQueue().late_parts(rate, server, [0.988 * tail, 1.012 * tail])
    assert late is not None
    assert late[1] <= 0.011 and late[0] >= 0.009


def test_late_parts_without_queue_are_those_of_lone_requests() -> None:
    late = BatchQueue().late_parts(1e-6, _server(4, 9.0, 1.0), [9.9, 10.1])
    assert late == pytest.approx([1.0, 0.0], abs=1e-6)


def test_nothing_is_in_time_at_capacity() -> None:
    server = _server(4, 1.0, 1.0)
    assert BatchQueue().late_parts(server.capacity_rps, server, [1e6]) == [1.0]


@pytest.mark.parametrize(
    "server",
    [
        BatchServer((1.0, 2.0), 2, 0.0, processes=2),
        BatchServer((1.0, 2.0), 2, 1.0),
        BatchServer((1.0, 2.0), 2, 0.0, latency_cv=0.1),
        BatchServer((1.0, 2.0), 2, 0.0, pause_cv=0.1),
        BatchServer((1.0, 2.0), 2, 0.0, pause_factor=1.2),
        BatchServer((2.0, 1.0), 2, 0.0),
    ],
)
def test_nothing_is_said_at_once_of_batches_that_vary_wait_or_get_quicker(server: BatchServer) -> None:
    assert isinstance(BatchQueue(), QuickQueueModel)
    assert BatchQueue().late_parts(10.0, server, [5.0]) is None
