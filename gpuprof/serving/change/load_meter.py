"""Measures what a running server is asked: rates, and how long batches take beside what was predicted."""

from __future__ import annotations

import time

from gpuprof.serving.change.bounds import Observed
from gpuprof.serving.change.window import Counted
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import AnyReplica, ServedModel


class LoadMeter:
    """Gives, each time it is asked, what happened since it was asked last.

    Parameters
    ----------
    router : Router
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._at = time.monotonic()
        self._counted: dict[str, Counted] = {}
        self._batches: dict[str, dict[int, tuple[int, int]]] = {}

    def take(self) -> dict[str, Observed]:
        """Return what each model did; models that were not there the last time are left out."""
        now = time.monotonic()
        seconds, self._at = max(1e-6, now - self._at), now
        models = self._router.all()
        before, self._counted = self._counted, {model.name: Counted.of(model.counts()) for model in models}
        slowdowns = {model.name: self._slowdown(model) for model in models}
        replicas = [replica for model in models for replica in model.replicas]
        self._batches = {replica.plan.name: _batches(replica) for replica in replicas}
        return {
            name: Observed(before[name].until(counted, seconds), slowdowns[name])
            for name, counted in self._counted.items()
            if name in before
        }

    def _slowdown(self, model: ServedModel) -> float | None:
        """Return the time of the batches of a model since the last time over what was predicted for them."""
        took_ns = predicted_ns = 0.0
        for replica in model.replicas:
            predicted_ms = replica.plan.latency_ms
            earlier = self._batches.get(replica.plan.name, {})
            for rows, (count, nanoseconds) in _batches(replica).items():
                count_before, nanoseconds_before = earlier.get(rows, (0, 0))
                if predicted_ms is not None and rows <= len(predicted_ms):
                    took_ns += nanoseconds - nanoseconds_before
                    predicted_ns += 1e6 * (count - count_before) * predicted_ms[rows - 1]
        return took_ns / predicted_ns if predicted_ns > 0.0 else None


def _batches(replica: AnyReplica) -> dict[int, tuple[int, int]]:
    """Return, by rows, how many batches there were and the nanoseconds that they took in the worker."""
    batches = replica.batches.items()
    return {rows: (one.count, one.gather + one.infer + one.scatter) for rows, one in batches}
