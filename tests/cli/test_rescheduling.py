"""``gpuprof simulate --reschedule``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from gpuprof.cli.main import main
from gpuprof.cli.rescheduling import reschedule
from gpuprof.deployment import DeploymentMap, write_map
from gpuprof.errors import InputError
from gpuprof.simulator.arrivals import Recorded
from gpuprof.simulator.cluster import Options
from gpuprof.simulator.failures import Failure
from gpuprof.simulator.reschedule import MoveCosts
from tests.simulator.maps import deployed, replica

ONE = deployed([[replica("m", [10.0])]], slo_ms=100.0)
LOAD = {"m": Recorded(np.arange(0, 30_000_000_000, 50_000_000), 30.0)}


def test_the_scheduler_sees_the_rates_of_each_period_but_the_last() -> None:
    seen: list[Mapping[str, float]] = []

    def scheduler(rates: Mapping[str, float]) -> DeploymentMap | None:
        seen.append(rates)
        return None

    reschedule(ONE, LOAD, Options(30.0), 10.0, scheduler, MoveCosts())
    assert seen == [{"m": 20.0}, {"m": 20.0}]


@pytest.mark.parametrize(
    ("options", "period_s", "message"),
    [
        (Options(30.0, failures=(Failure("node0", None, 1.0),)), 10.0, "--reschedule and --fail exclude each other"),
        (Options(30.0), 30.0, "--reschedule must be shorter than the duration of 30 s"),
    ],
)
def test_what_cannot_be_rescheduled_is_refused(options: Options, period_s: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reschedule(ONE, LOAD, options, period_s, lambda rates: None, MoveCosts())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "ffd"], "--policy says how to reschedule (add --reschedule 60s)"),
        (["--reschedule", "10s", "--sample", "4"], "--reschedule cannot be sampled"),
        (["--reschedule", "10s", "--db", "nowhere"], "nowhere does not exist"),
        (["--reschedule", "10s", "--load-time", "soon"], "cannot read --load-time from 'soon'"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_map(ONE, tmp_path / "map.json")
    assert main(["simulate", str(tmp_path / "map.json"), *words]) == 3
    assert message in capsys.readouterr().err
