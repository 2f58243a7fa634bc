"""The default queueing model: analytic for a single process under Poisson arrivals, else by simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, ServedPart, Sojourn

#: Length of the lattice of `batch_chain`, in full batches' times.
LATTICE_SERVICES = 4


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


def make_overload(load: float, server: BatchServer) -> Sojourn:
    """Return the law at or beyond capacity: infinite times."""
    return Sojourn(load, float(server.batch), math.inf, ((0.0, math.inf), (1.0, math.inf)))


def _is_analysed(arrivals: Arrivals, server: BatchServer) -> bool:
    longest = max(server.latency_ms[: server.batch]) * max(1.0, server.pause_factor)
    is_alike = server.pause_cv in (None, server.latency_cv)
    # Arrivals during a batch must fit the lattice of `batch_chain`.
    fits = longest <= LATTICE_SERVICES * server.latency_ms[server.batch - 1]
    is_poisson = arrivals.process is None and abs(arrivals.scv - 1.0) < 1e-3
    return server.processes == 1 and is_poisson and is_alike and fits


def scale_server(server: BatchServer, unit_ms: float) -> BatchServer:
    """Return a replica with times in ``unit_ms``, rounded to five digits for more cache hits, and no overhead."""
    wait = _round(server.max_wait_ms / unit_ms)
    return BatchServer(
        tuple(_round(latency / unit_ms) for latency in server.latency_ms[: server.batch]),
        server.batch,
        wait if wait > 1e-9 else 0.0,
        server.processes,
        round(server.latency_cv, 4),
        _round(server.pause_factor),
        round(server.latency_cv if server.pause_cv is None else server.pause_cv, 4),
    )


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def scale_sojourn(law: Sojourn, unit_ms: float, overhead_ms: float) -> Sojourn:
    """Return a law in milliseconds, later by the overhead."""
    times = tuple((p, ms * unit_ms + overhead_ms) for p, ms in law.quantiles_ms)
    return Sojourn(law.utilization, law.mean_batch, law.mean_ms * unit_ms + overhead_ms, times)


def pair_quantiles(probabilities: Iterable[float], times: Iterable[float]) -> tuple[tuple[float, float], ...]:
    """Return the table of quantiles from probability 0 to 1."""
    table = [(float(p), float(ms)) for p, ms in zip(probabilities, times, strict=True)]
    last = next((number for number, (p, _) in enumerate(table) if p >= 0.99999), len(table) - 1)
    return ((0.0, table[0][1]), *table[1:last], (max(table[last][0], 0.99999), table[last][1]))
