"""The commands that give the papers' figures from imported data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.reproduce.__main__ import ReproductionStep, list_steps, read_figure
from gpuprof.errors import InputError
from gpuprof.placement.contract import demand, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.policies import make_policy


def test_where_a_publication_is_missing_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="parvagpu_a100 is not there"):
        list(list_steps(tmp_path, tmp_path))


def test_a_command_can_be_typed_as_it_is_printed() -> None:
    assert (
        ReproductionStep(("place", "--slo-file", "my demands.csv")).command
        == "gpuprof place --slo-file 'my demands.csv'"
    )


def test_the_figures_of_a_map_are_read_off_it(tmp_path: Path) -> None:
    given = problem([demand("a", 30.0), demand("b", 10.0)])
    deployment = to_map(given, make_policy("ffd").place(given))
    path = tmp_path / "map.json"
    path.write_text(deployment.to_json())
    assert read_figure(ReproductionStep((), figure="gpus", output=path)) == str(deployment.predicted.gpus)
    assert read_figure(ReproductionStep((), figure="goodput", output=path)) == f"{deployment.predicted.goodput_rps:.2f}"
    shares = {replica.model: replica.sm_share_pct for *_, replica in deployment.places()}
    assert json.loads(read_figure(ReproductionStep((), figure="shares", output=path))) == shares
