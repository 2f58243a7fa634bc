"""The default queueing model: analytic for a single process under Poisson arrivals, else by simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, ServedPart, Sojourn
from gpuprof.estimators.queueing.load_guess import guess_load
from gpuprof.estimators.queueing.scaling import LATTICE_SERVICES, make_overload


class BatchQueue:
    """Implements `gpuprof.domain.sojourn.QueueModel` for the rules of `gpuprof.rules.batching` and `routing`.

    A single process under Poisson arrivals is solved by its embedded Markov chain (`replica`). Several processes or
    replicas, other arrivals, batches whose variation differs after a pause, and small batches that take several times
    as long as full ones are simulated request by request (`pool`). Service times have a gamma distribution with the
    given coefficient of variation. Longer batches after a pause do not affect stability.

    Results depend only on ratios of times, by which they are cached. `bench.queueing` prints the errors.
    """

    is_analytic = True

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return the distribution of the time in the system; infinite times at or beyond capacity."""
        return self.pool(arrivals, (server,)).whole

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the distribution of the time in a system of replicas that share the stream."""
        capacity = math.fsum(server.capacity_rps for server in servers)
        load = arrivals.rate_rps / capacity
        if load >= 1.0:
            rates = [arrivals.rate_rps * server.capacity_rps / capacity for server in servers]
            laws = [make_overload(load, server) for server in servers]
            return PoolSojourn(laws[0], tuple(map(ServedPart, rates, laws)))
        # SciPy takes a third of a second to import: plans for a part of the SLO never need it.
        if len(servers) > 1 or not _is_analysed(arrivals, servers[0]):
            from gpuprof.estimators.queueing.pool import solve_pool

            return solve_pool(arrivals, servers, coarse=coarse)
        from gpuprof.estimators.queueing.replica import solve_replica

        whole = solve_replica(arrivals.rate_rps, servers[0])
        return PoolSojourn(whole, (ServedPart(arrivals.rate_rps, whole),))

    def guess_load(self, server: BatchServer, count: int, limit_ms: float, percent: float) -> float:
        """Return about the largest load at which equal replicas answer in time, by a formula."""
        return guess_load(server, count, limit_ms, percent)


def _is_analysed(arrivals: Arrivals, server: BatchServer) -> bool:
    longest = max(server.latency_ms[: server.batch]) * max(1.0, server.pause_factor)
    is_alike = server.pause_cv in (None, server.latency_cv)
    # Arrivals during a batch must fit the lattice of `batch_chain`.
    fits = longest <= LATTICE_SERVICES * server.latency_ms[server.batch - 1]
    is_poisson = arrivals.process is None and abs(arrivals.scv - 1.0) < 1e-3
    return server.processes == 1 and is_poisson and is_alike and fits
