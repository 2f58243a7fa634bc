"""Router and clients take the time of a core from a batch only where no core is idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from gpuprof.domain.arrival_process import ArrivalProcess, GammaArrivals, RecordedArrivals
from gpuprof.domain.deployment import Replica
from gpuprof.domain.sojourn import BatchServer
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.rules.host_work import HostWork, disturb_servers
from gpuprof.rules.turns import LoadedReplica
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.outcome import SimulationOutcome
from tests.simulator.maps import make_map, replica

TWO_CORES = HostWork(host_ms=2.0, host_cores=2)


def half(model: str, ms: float = 10.0, share_pct: float = 50.0) -> Replica:
    return replica(model, [ms]).model_copy(update={"sm_share_pct": share_pct})


def run(
    replicas: Sequence[Replica], arrivals_ms: Mapping[str, Sequence[float]], host: HostWork, gpus: int = 1
) -> SimulationOutcome:
    times: dict[str, ArrivalProcess] = {
        model: RecordedArrivals(np.array([round(1e6 * t) for t in times_ms], np.int64), 1.0)
        for model, times_ms in arrivals_ms.items()
    }
    spread = [replicas[i::gpus] for i in range(gpus)]
    return simulate(make_map(spread), times, SimulationOptions(1.0, host=host))


def longest(outcome: SimulationOutcome) -> list[float]:
    return [model.max_ms or 0.0 for model in outcome.models]


def test_nobody_is_disturbed_while_a_core_is_idle() -> None:
    # b comes when a has gone: there is an idle core all the time.
    assert longest(run([half("a"), half("b")], {"a": [0.0], "b": [20.0]}, TWO_CORES)) == [10.0, 10.0]


def test_what_comes_while_every_core_runs_a_batch_takes_its_time_from_one() -> None:
    # At 2 both run; the arrivals at 3 and 4 take 1 ms each from one of them or the other.
    simulated = run([half("a"), half("b")], {"a": [0.0, 3.0, 4.0], "b": [2.0]}, TWO_CORES)
    quiet = run([half("a"), half("b")], {"a": [0.0, 3.0, 4.0], "b": [2.0]}, HostWork())
    assert simulated.replicas[0].utilization + simulated.replicas[1].utilization > sum(
        replica.utilization for replica in quiet.replicas
    )
    assert longest(quiet) == [26.0, 10.0]
    assert all(late >= early for late, early in zip(longest(simulated), longest(quiet), strict=True))
    assert longest(simulated) != longest(quiet)


def test_alone_on_its_only_core_a_batch_bears_every_request() -> None:
    # 1 ms each at 3 and 4, while the batch runs, and at its end for the answer, while the next one runs; and so on.
    simulated = run([half("a", share_pct=100.0)], {"a": [0.0, 3.0, 4.0]}, HostWork(host_ms=2.0, host_cores=1))
    assert longest(simulated) == [pytest.approx(34.0 - 4.0, abs=1e-6)]  # ends at 13, 24 and so 12 + 11 + 11


def test_on_several_machines_and_for_replicas_that_come_and_go_nothing_is_said() -> None:
    arrivals = {"a": [0.0, 3.0, 4.0], "b": [2.0]}
    assert longest(run([half("a"), half("b")], arrivals, TWO_CORES, gpus=2)) == [26.0, 10.0]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_the_simulation_comes_to_what_the_prediction_says(load: float) -> None:
    """Mean time in service, by the queueing model that `place` predicts with and event by event."""
    ms = {"a": 6.5, "b": 46.0}
    host = HostWork(host_ms=0.8, host_cores=2)
    rates = {model: load * 1000.0 / time for model, time in ms.items()}
    arrivals: dict[str, ArrivalProcess] = {model: GammaArrivals(rate) for model, rate in rates.items()}
    parts = [half(model, time) for model, time in ms.items()]
    simulated = simulate(make_map([parts]), arrivals, SimulationOptions(2000.0, seed=1, host=host))
    running = [LoadedReplica(BatchServer((time,), 1, 0.0), rates[model], 50.0) for model, time in ms.items()]
    expected = disturb_servers(host, running, BatchQueue())
    for model, calm, server in zip(simulated.models, ms.values(), expected, strict=True):
        longer, predicted = (model.stage_mean_ms["service"] or 0.0) / calm - 1.0, server.latency_ms[0] / calm - 1.0
        # The long batches are met more often than predicted: they go on beside several of the short ones.
        assert longer == pytest.approx(predicted, rel=0.15 if model.model == "a" else 0.4, abs=0.001)


def test_most_of_the_work_goes_on_where_it_was_idle_last() -> None:
    # b's batch runs all the while; every second of a's comes while the one before it runs.
    arrivals = {"a": [10.0 * k for k in range(1, 40)] + [10.0 * k + 1.0 for k in range(1, 40)], "b": [0.0]}
    short, long = run([half("a", 4.0), half("b", 500.0)], arrivals, TWO_CORES).replicas
    extra = short.utilization - 78 * 4.0 / 1000.0, long.utilization - 0.5
    assert extra[0] + extra[1] > 0.05
    assert extra[0] > 3.0 * extra[1] > 0.0
