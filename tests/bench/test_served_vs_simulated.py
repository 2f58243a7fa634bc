"""The comparison of served with simulated: capacities of a map, and what counts as agreement."""

from pathlib import Path

import pytest

from bench.served_vs_simulated import capacities_of, print_comparison
from gpuprof.domain.deployment import write_map
from tests.simulator.maps import make_map, replica


def row(goodput_rps: float, p99_ms: float) -> dict[str, object]:
    return {"model": "m", "rate_rps": 100.0, "goodput_rps": goodput_rps, "p50_ms": 5.0, "p99_ms": p99_ms}


def test_the_capacity_is_that_of_full_batches_in_all_processes(tmp_path: Path) -> None:
    gpus = [[replica("a", [4.0, 5.0], processes=2)], [replica("a", [10.0]), replica("b", [2.0])]]
    write_map(make_map(gpus), tmp_path / "map.json")
    assert capacities_of(tmp_path / "map.json") == {"a": pytest.approx(900.0), "b": pytest.approx(500.0)}


@pytest.mark.parametrize(
    ("simulated", "agrees"),
    [(row(96.0, 11.4), True), (row(94.0, 10.0), False), (row(100.0, 11.6), False), (row(100.0, 8.4), False)],
)
def test_what_is_near_agrees(simulated: dict[str, object], agrees: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_comparison([(0.3, [row(100.0, 10.0)], simulated)]) is agrees
    assert ("DIFFERS" in capsys.readouterr().out) is not agrees


def test_of_several_runs_the_median_is_compared_and_their_spread_shown(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [row(100.0, p99_ms) for p99_ms in (20.0, 10.0, 9.0)]
    assert print_comparison([(0.3, runs, row(100.0, 11.0))])
    assert "9.0 to 20.0 in 3 runs" in capsys.readouterr().out
