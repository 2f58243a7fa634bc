"""Batches of sizes that never come about make no difference to a queue."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing import replica
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.estimators.queueing.replica import drop_unused_batches


def _server(batch: int, cv: float = 0.0, pause: float = 1.0) -> BatchServer:
    return BatchServer(tuple(2.0 + 0.1 * n for n in range(1, batch + 1)), batch, 0.0, 1, cv, pause)


@pytest.mark.parametrize("cv", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("pause", [1.0, 1.3])
def test_a_lightly_loaded_replica_has_the_queue_of_its_small_batches(cv: float, pause: float) -> None:
    server, arrivals = _server(128, cv, pause), Arrivals(300.0)
    assert drop_unused_batches(arrivals.rate_rps, server).batch < 60
    sojourn = BatchQueue().sojourn(arrivals, server)
    with mock.patch.object(replica, "drop_unused_batches", lambda rate_rps, server: server):
        whole = BatchQueue().sojourn(arrivals, server)
    for percent in (50.0, 90.0, 99.0, 99.9):
        assert sojourn.percentile(percent) == pytest.approx(whole.percentile(percent), rel=5e-3)
    assert sojourn.mean_ms == pytest.approx(whole.mean_ms, rel=1e-4)
    assert sojourn.utilization == pytest.approx(whole.utilization, rel=1e-3)


def test_replicas_that_differ_in_unused_batches_have_one_queue() -> None:
    some, more = _server(64), _server(128)
    assert drop_unused_batches(1000.0, some) == drop_unused_batches(1000.0, more)
    assert BatchQueue().sojourn(Arrivals(1000.0), some) == BatchQueue().sojourn(Arrivals(1000.0), more)


def test_batches_that_fill_are_kept() -> None:
    server = _server(16)
    assert drop_unused_batches(0.9 * server.capacity_rps, server) is server


def test_a_larger_batch_that_is_quicker_counts_with_the_slowest_below_it() -> None:
    server = replace(_server(4), latency_ms=(50.0, 1.0, 1.0, 1.0))
    assert drop_unused_batches(50.0, server).batch == 4
