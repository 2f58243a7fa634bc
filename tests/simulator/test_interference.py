"""Batches are slowed by what really runs beside them, and each combination is asked for once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpuprof.domain.arrival_process import ArrivalProcess, GammaArrivals
from gpuprof.domain.deployment import Replica
from gpuprof.errors import InputError
from gpuprof.simulator.cluster import Failure, PlacedInstance, SimulationOptions
from gpuprof.simulator.engine import simulate
from gpuprof.simulator.outcome import SimulationOutcome
from tests.simulator.maps import at, make_map, replica

A, B, C = replica("a", [10.0]), replica("b", [4.0]), replica("c", [4.0])


class InterferenceQuestions:
    """Half as slow again for each neighbour; remembers what it was asked."""

    def __init__(self) -> None:
        self.questions: list[tuple[str, list[str]]] = []

    def __call__(self, place: PlacedInstance, beside: Sequence[PlacedInstance]) -> float:
        self.questions.append((place.replica.model, sorted(neighbour.replica.model for neighbour in beside)))
        return 1.0 + 0.5 * len(beside)


def run(
    gpus: Sequence[Sequence[Replica]], questions: InterferenceQuestions, **arrivals: ArrivalProcess
) -> SimulationOutcome:
    return simulate(make_map(gpus), arrivals, SimulationOptions(1.0), interference=questions)


def means(result: SimulationOutcome) -> list[float | None]:
    return [model.mean_ms for model in result.models]


def test_a_batch_is_slowed_by_who_runs_when_it_starts_until_it_ends() -> None:
    result = run([[A, B]], InterferenceQuestions(), a=at(0.0), b=at(2.0))
    assert means(result) == [10.0, 6.0]  # a started alone, and b beside it


def test_a_neighbour_that_ends_at_the_instant_of_the_start_does_not_disturb() -> None:
    assert means(run([[A, B]], InterferenceQuestions(), a=at(0.0), b=at(10.0))) == [10.0, 4.0]


def test_of_two_that_start_at_one_instant_the_model_that_comes_first_in_the_map_starts_alone() -> None:
    assert means(run([[A, B]], InterferenceQuestions(), a=at(5.0), b=at(5.0))) == [10.0, 6.0]
    assert means(run([[B, A]], InterferenceQuestions(), a=at(5.0), b=at(5.0))) == [4.0, 15.0]


def test_other_gpus_and_other_processes_of_the_same_replica_do_not_disturb() -> None:
    assert means(run([[A], [B]], InterferenceQuestions(), a=at(0.0), b=at(2.0))) == [10.0, 4.0]
    assert means(run([[replica("a", [10.0], processes=2), B]], InterferenceQuestions(), a=at(0.0, 1.0))) == [10.0, None]


def test_a_replica_with_several_processes_is_one_neighbour_as_long_as_any_runs() -> None:
    result = run(
        [[replica("a", [10.0], processes=2), B]], InterferenceQuestions(), a=at(0.0, 6.0), b=at(1.0, 12.0, 30.0)
    )
    assert means(result) == [pytest.approx((10.0 + 15.0) / 2), pytest.approx((6.0 + 6.0 + 4.0) / 3)]


def test_a_neighbour_that_fails_disturbs_no_longer() -> None:
    options = SimulationOptions(1.0, failures=(Failure("node0", 0, 0.001, 0.001),))
    # a is run anew from 2 until 12, alone; b comes after it has ended.
    arrivals: dict[str, ArrivalProcess] = {"a": at(0.0), "b": at(13.0)}
    assert means(simulate(make_map([[A, B]]), arrivals, options, interference=InterferenceQuestions())) == [12.0, 4.0]


def test_each_combination_is_asked_once_for_all_gpus_that_are_alike() -> None:
    questions = InterferenceQuestions()
    run([[A, B, C], [A, B, C]], questions, a=GammaArrivals(150.0), b=GammaArrivals(300.0), c=GammaArrivals(300.0))
    assert len(questions.questions) == len({(name, tuple(beside)) for name, beside in questions.questions})
    assert len(questions.questions) == 3 * 4


def test_equal_neighbours_are_counted_not_told_apart() -> None:
    questions = InterferenceQuestions()
    run([[A, A, A, A]], questions, a=GammaArrivals(350.0))
    assert sorted(len(beside) for _, beside in questions.questions) == [0, 1, 2, 3]


def test_a_crowd_of_different_replicas_is_told_apart() -> None:
    crowd = [replica(f"m{i}", [5.0]) for i in range(60)]
    arrivals: dict[str, ArrivalProcess] = {f"m{i}": at(0.0 if i < 30 else 1.0) for i in range(60)}
    result = simulate(make_map([crowd]), arrivals, SimulationOptions(1.0), interference=InterferenceQuestions())
    assert means(result) == [5.0 * (1.0 + 0.5 * i) for i in range(60)]


def test_no_interference_is_what_the_map_says() -> None:
    arrivals: dict[str, ArrivalProcess] = {"a": GammaArrivals(80.0), "b": GammaArrivals(200.0)}
    plain = simulate(make_map([[A, B]]), arrivals, SimulationOptions(2.0))
    neutral = simulate(make_map([[A, B]]), arrivals, SimulationOptions(2.0), interference=lambda place, beside: 1.0)
    assert plain == neutral


def test_a_slowdown_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="a slowdown must be above 0 and below a million but node0/0 has -1"):
        simulate(make_map([[A, B]]), {"a": at(0.0)}, SimulationOptions(1.0), interference=lambda place, beside: -1.0)
