"""Time in the system of the requests of one batching process, from the stationary law of its chain.

For every batch size n, the expected number of requests in a batch of n with a wait of at most w, given the time ``y``
until the process is free, has a closed form for Poisson arrivals. The form is averaged over the stationary ``y``; then
the service time of n is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import gammainc

from gpuprof.estimators.queueing.batch_backlog import Array, convolve
from gpuprof.estimators.queueing.batch_chain import (
    Service,
    StationaryLaw,
    fresh_probabilities,
    poisson_cdf,
    poisson_pmf,
)

_NEGLIGIBLE = 1e-9


@dataclass(frozen=True, slots=True)
class WaitingLaw:
    """Waits of the requests, by the size of their batch, twice.

    First come batches that follow another at once, then batches on an idle process.
    """

    waits: Array  #: Shape (K,). Increasing, from 0.
    #: Shape (2 B, K). Probability that a request leaves in a batch of n after waiting at most ``waits``, without the
    #: two atoms.
    below: Array
    #: ``at_once``, ``timer``: Shape (2 B,). Probability that a request leaves in a batch of n after waiting exactly 0,
    #: or exactly ``max_wait``.
    at_once: Array
    timer: Array
    batch_sizes: Array  #: Shape (2 B,). Probability that a batch has n requests.
    max_wait: float

    def mean(self) -> float:
        """Return the mean wait."""
        within = self.below.sum(axis=0)
        rest = float(np.sum(np.diff(self.waits) * (within[-1] - 0.5 * (within[1:] + within[:-1]))))
        return rest + self.max_wait * float(self.timer.sum())


def waiting_law(rate: float, max_wait: float, service: Service, law: StationaryLaw) -> WaitingLaw:
    """Return the law of the waits for a Poisson stream of ``rate`` and the stationary law of the chain."""
    batch = len(service.means)
    y, mass = _points(rate, service, law)
    waits = _wait_grid(max_wait, service, law)
    fresh = fresh_probabilities(rate, max_wait, batch, y) @ mass
    sizes = np.arange(1, batch)
    young = float(np.exp(-rate * np.maximum(y - max_wait, 0.0)) @ mass)  # the timer or an arrival dispatches
    timer = young * poisson_pmf(sizes - 1.0, np.array(rate * max_wait))

    below = np.zeros((2 * batch, len(waits)))
    below[: batch - 1] = _by_process(rate, max_wait, sizes, y, mass, waits)
    below[batch - 1] = _full_on_release(rate, service, law, waits)
    if max_wait > 0.0:
        below[batch:-1] = ((sizes - 1.0) * timer)[:, None] * np.minimum(waits / max_wait, 1.0)
        below[-1] = _filled_while_idle(rate, max_wait, batch, y, mass, waits, float(fresh[-1]))
    at_once = np.append(np.zeros(2 * batch - 1), fresh[-1])
    by_timer = np.concatenate([np.zeros(batch), timer, [0.0]])
    sizes_law = fresh.copy()
    sizes_law[batch - 1] = 1.0 - fresh.sum()  # the rest are full batches that leave or follow a backlog
    # 1 except for losses by the lattice and by the cut tails.
    total = below[:, -1].sum() + timer.sum() + fresh[-1]
    return WaitingLaw(waits, below / total, at_once / total, by_timer / total, sizes_law, max_wait)


def sojourn_cdf(waits: WaitingLaw, service: Service, times: Array) -> Array:
    """Return the probability that wait and service together last at most ``times``."""
    result = np.zeros(len(times))
    for n, mean in enumerate(service.fresh_means):
        if waits.below[n, -1] > _NEGLIGIBLE:
            remaining = times[None, :] - mean * service.nodes[:, None]
            result += service.weights @ np.interp(remaining, waits.waits, waits.below[n], left=0.0)
        for share, start in ((waits.at_once[n], 0.0), (waits.timer[n], waits.max_wait)):
            if share > _NEGLIGIBLE:
                result += share * _service_cdf(times - start, float(mean), service.cv)
    return np.minimum(result, 1.0)


def _service_cdf(times: Array, mean: float, cv: float) -> Array:
    if cv == 0.0:
        # A time equal to the mean up to rounding counts as within.
        return np.asarray(times >= mean * (1.0 - 1e-12), dtype=np.float64)
    shape = 1.0 / cv**2
    return np.asarray(gammainc(shape, shape * np.maximum(times, 0.0) / mean), dtype=np.float64)


def _points(rate: float, service: Service, law: StationaryLaw) -> tuple[Array, Array]:
    """Return y and its probability where a batch smaller than B can follow: fresh states exactly, then the lattice."""
    batch = len(service.means)
    fresh_y = (service.fresh_means[:, None] * service.nodes).ravel()
    fresh_mass = (law.fresh[:, None] * service.weights).ravel()
    mask = fresh_mass > _NEGLIGIBLE
    # A Poisson number with this mean is below B with a probability below 1e-9, for every B up to 512.
    end = int(np.searchsorted(law.lattice_y * rate, batch + 6.0 * batch**0.5 + 14.0))
    return (
        np.concatenate([fresh_y[mask], law.lattice_y[:end]]),
        np.concatenate([fresh_mass[mask], law.lattice_mass[:end]]),
    )


def _wait_grid(max_wait: float, service: Service, law: StationaryLaw) -> Array:
    """Return a grid of waits: every kink, fine at the shortest service, coarse in the tail."""
    means = service.fresh_means
    step = 2.0 * law.lattice_y[0]
    last = max(float(law.lattice_y[-1]) + 0.5 * step, float(means.max() * service.edges[-1])) + step
    parts = [
        np.arange(0.0, min(4.0 * means[-1], last), step),
        np.geomspace(float(means[-1]), last, 48) if last > means[-1] else np.array([last]),
        np.linspace(0.0, 2.0 * means[0], 33),
        np.linspace(0.0, max_wait, 65) if max_wait > 0.0 else np.zeros(1),
        means,
        np.array([max(last, max_wait)]),
    ]
    return np.unique(np.concatenate(parts))


def _by_process(rate: float, max_wait: float, sizes: Array, y: Array, mass: Array, waits: Array) -> Array:
    """Return the waits in batches of n < B at the process's release: arrivals in (0, y), the oldest past the timer."""
    late = y > max_wait
    y, mass = y[late], mass[late]
    if not len(y) or not len(sizes):
        return np.zeros((len(sizes), len(waits)))
    taken = rate * poisson_pmf(sizes[:, None] - 1.0, rate * y) * mass
    all_young = float(np.exp(-rate * (y - max_wait)) @ mass)
    not_taken = rate * all_young * poisson_pmf(sizes - 1.0, np.array(rate * max_wait))
    reach = np.minimum(y[:, None], waits[None, :])
    return np.asarray(taken @ reach - not_taken[:, None] * np.minimum(waits, max_wait), dtype=np.float64)


def _filled_while_idle(
    rate: float, max_wait: float, batch: int, y: Array, mass: Array, waits: Array, probability: float
) -> Array:
    """Return the waits in full batches dispatched by their last request, without its own, at most ``max_wait``."""
    if batch < 2 or probability < _NEGLIGIBLE:
        return np.zeros(len(waits))
    order = np.argsort(y)
    ordered = y[order]
    upto = np.append(0.0, np.cumsum(mass[order]))
    beyond = np.append(np.cumsum((mass[order] * _late_density(rate, max_wait, batch, ordered))[::-1])[::-1], 0.0)
    position = np.searchsorted(ordered, waits)
    density = upto[position] * _late_density(rate, max_wait, batch, waits) + beyond[position]
    density[waits > max_wait] = 0.0
    inside = np.append(0.0, np.cumsum(0.5 * (density[1:] + density[:-1]) * np.diff(waits) * (waits[1:] <= max_wait)))
    return np.asarray(inside * ((batch - 1) * probability / max(inside[-1], 1e-300)), dtype=np.float64)


def _late_density(rate: float, max_wait: float, batch: int, start: Array) -> Array:
    """Return the density of requests whose batch is filled after ``start``, before the timer ends."""
    early = poisson_cdf(batch - 2, rate * start) - poisson_cdf(batch - 2, np.array(rate * max_wait))
    late = np.exp(-rate * np.maximum(start - max_wait, 0.0)) * poisson_pmf(
        np.array(batch - 2.0), np.array(rate * max_wait)
    )
    return np.asarray(np.where(start < max_wait, early, 0.0) + late, dtype=np.float64)


def _full_on_release(rate: float, service: Service, law: StationaryLaw, waits: Array) -> Array:
    """Return the waits in full batches taken when the process comes free, for their B requests."""
    batch = len(service.means)
    step = 2.0 * law.lattice_y[0]
    mass = _with_fresh(service, law, step)
    centres = (np.arange(len(mass)) + 0.5) * step
    batch_means = _mean_taken(rate * centres, batch)
    # Requests that arrived more than w before the release are those among the first B of (0, y - w). From its middle on
    # the convolution is the sum over y of mass(y) taken(y - k step), for k from 0 on.
    older = convolve(mass, batch_means[::-1])[len(mass) - 1 :]
    within = float(mass @ batch_means) - np.append(older, 0.0)
    partial = mass * poisson_cdf(batch - 2, rate * centres) * rate
    weight, moment = np.append(0.0, np.cumsum(partial)), np.append(0.0, np.cumsum(partial * centres))
    edges = np.arange(len(mass) + 1) * step
    not_full = moment + edges * (weight[-1] - weight)
    return np.interp(waits, edges, np.maximum.accumulate(np.maximum(within - not_full, 0.0)))


def _mean_taken(expected: Array, batch: int) -> Array:
    """Return E[min(N, B)] of a Poisson N."""
    return expected * poisson_cdf(batch - 2, expected) + batch * (1.0 - poisson_cdf(batch - 1, expected))


def _with_fresh(service: Service, law: StationaryLaw, step: float) -> Array:
    """Return the law of y on the lattice's cells, the fresh states split over the two nearest."""
    place = (service.fresh_means[:, None] * service.nodes).ravel() / step - 0.5
    share = (law.fresh[:, None] * service.weights).ravel()
    place = np.maximum(place, 0.0)
    cell = place.astype(np.int64)
    mass = np.zeros(max(len(law.lattice_mass), int(cell.max()) + 2))
    mass[: len(law.lattice_mass)] = law.lattice_mass
    np.add.at(mass, cell, share * (1.0 - (place - cell)))
    np.add.at(mass, cell + 1, share * (place - cell))
    return mass
