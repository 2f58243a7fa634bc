from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuprof.estimators.queueing import pool_kernel
from gpuprof.estimators.queueing.pool_simulation import _quantiles, _replicas
from gpuprof.estimators.queueing.replica_kernel import serve_alone
from gpuprof.estimators.queueing.scaled_server import ScaledServer

_REQUESTS = 3_000


@settings(max_examples=100, deadline=None)
@given(
    batch=st.integers(1, 12),
    processes=st.integers(1, 4),
    load=st.floats(0.05, 0.99),
    start=st.floats(0.0, 5.0),
    cvs=st.tuples(st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.5])),
    pause=st.sampled_from([1.0, 1.6]),
    in_step=st.booleans(),
)
@example(batch=4, processes=1, load=0.5, start=0.0, cvs=(0.0, 0.0), pause=1.0, in_step=True)
@example(batch=8, processes=2, load=0.5, start=0.0, cvs=(0.0, 0.0), pause=1.0, in_step=True)
def test_one_replica_is_served_as_by_the_router_of_a_pool_of_one(
    batch: int, processes: int, load: float, start: float, cvs: tuple[float, float], pause: float, in_step: bool
) -> None:
    latency = tuple((start + n) / (start + batch) for n in range(1, batch + 1))
    server = ScaledServer(latency, 0.0, processes, cvs[0], pause, cvs[1])
    replicas, random = _replicas([(server, 1)]), np.random.default_rng(7)
    # Even gaps: batches end just as requests come.
    gaps = np.full(_REQUESTS, 0.125) if in_step else random.exponential(1.0 / (load * server.capacity), _REQUESTS)
    arrived = np.cumsum(gaps)
    groups, others, even = (random.standard_normal(1 << 12, np.float32) for _ in range(3))
    draws = pool_kernel.Draws(groups, others, even, batch)

    alone, pool = (pool_kernel.new_state(replicas, _REQUESTS, batch) for _ in range(2))
    spent, expected = np.full(_REQUESTS, np.nan), np.full(_REQUESTS, np.nan)
    serve_alone(replicas, alone, draws, arrived, spent)
    pool_kernel.serve(replicas, pool, draws, arrived, expected, np.zeros(_REQUESTS, np.int64))

    np.testing.assert_array_equal(spent, expected)
    assert (alone.busy[0], alone.batches[0]) == (pool.busy[0], pool.batches[0])


def test_the_law_of_batches_that_do_not_vary_is_constant() -> None:
    assert np.ptp(_quantiles(0.0)) == 0.0 < np.ptp(_quantiles(0.25))
