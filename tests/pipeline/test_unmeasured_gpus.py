"""Planning for GPUs of which nothing was measured: every board with a price, one's own, in a precision asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

import gpuprof
from gpuprof.domain.catalogue import devices
from gpuprof.domain.demand import Demand, Slo
from gpuprof.errors import InputError
from gpuprof.pipeline.problem import PlanningOptions
from tests.command_line import CommandLine
from tests.domain.test_catalogue import BOARD, OFFERS

pytestmark = pytest.mark.slow

FAST = PlanningOptions(max_batch=2, time_limit_s=1.0)
PRICED = [name for name, board in devices().items() if board.price_per_hour is not None]


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    gpuprof.build_model("mlp", here / "mlp.onnx")
    (here / "slo.csv").write_text("model,rate_rps,slo_ms\nmlp.onnx,100,20\n")
    (here / "own.toml").write_text(BOARD)
    return here


def test_a_first_answer_does_not_wait_for_a_compiler() -> None:
    code = """
import sys, gpuprof
found = gpuprof.estimate(["mlp.onnx"], batches=[1, 2, 4, 8, 16, 32], device="h100")
print(len(found.rows()), "numba" in sys.modules, "lightgbm" in sys.modules)
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["6", "False", "False"]


def demands(here: Path) -> list[Demand]:
    return [Demand(str(here / "mlp.onnx"), 100.0, Slo(20.0))]


def test_any_is_every_board_with_a_price_and_the_cheapest_wins(here: Path) -> None:
    plan = gpuprof.place(demands(here), fleet="any", policy="ffd", options=FAST)
    assert [entry.device.name for entry in plan.problem.fleet.entries] == PRICED
    cheapest = min(PRICED, key=lambda name: devices()[name].price_per_hour or 0.0)
    best = gpuprof.place(demands(here), fleet="any", options=FAST).deployment
    assert [gpu.device for node in best.nodes for gpu in node.gpus] == [cheapest]
    assert best.predicted.lower_bound_cost_per_hour is not None


def test_any_leaves_out_boards_without_the_precision_and_says_so(here: Path) -> None:
    options = FAST.replace(precision="fp8", runtime="eager")
    plan = gpuprof.place(demands(here), fleet="any", policy="ffd", options=options)
    kinds = {entry.device.name for entry in plan.problem.fleet.entries}
    assert kinds == {name for name in PRICED if "float8" in devices()[name].flops_per_s}
    assert any(note.startswith("left out, without fp8 arithmetic: k80, t4, v100") for note in plan.notes)
    assert (plan.deployment.planned_with.precision, plan.deployment.planned_with.runtime) == ("fp8", "eager")
    assert {row["source"] for row in plan.rows()} == {"cross-gpu: float8, pytorch-eager, never compared"}
    with pytest.raises(InputError, match=r"t4 has no fp8 arithmetic .*float32, float16, int8"):
        gpuprof.place(demands(here), fleet="l4,t4", policy="ffd", options=options)


def test_check_recomputes_times_from_the_files_in_the_precision_of_the_map_or_another(here: Path) -> None:
    options = FAST.replace(precision="float16")
    plan = gpuprof.place(demands(here), fleet="l4", policy="ffd", options=options).deployment
    sound = gpuprof.check(plan)
    (basis,) = sound.notes  # no word of a missing database
    assert sound.is_sound and basis.startswith("0 of 1 model measured on l4")
    result = gpuprof.check(plan, precision="float32", runtime="eager")
    assert {violation.rule for violation in result.violations} == {"figures"}
    (here / "mlp.onnx").unlink()
    believed, *rest = gpuprof.check(plan).notes
    assert believed.startswith("the estimator 'database' cannot be asked") and rest == [basis]


def test_a_board_of_ones_own_is_estimated_placed_on_and_checked(here: Path, cli: CommandLine) -> None:
    with pytest.raises(InputError, match="--device-file FILE"):
        gpuprof.estimate([here / "mlp.onnx"], device="rtx-2080-ti")
    estimate = gpuprof.estimate([here / "mlp.onnx"], device="rtx-2080-ti", device_file="own.toml", precision="float16")
    assert estimate.estimates[0].latency_ms.source == "cross-gpu: float16, onnxruntime, never compared on this board"
    cli("place --gpus rtx-2080-ti:1 --policy ffd --device-file own.toml")
    assert "sound" in cli("check --device-file own.toml").out
    cli("check", code=1)


def test_offers_replace_prices_and_give_the_cost_an_interval(here: Path, cli: CommandLine) -> None:
    (here / "offers.csv").write_text(OFFERS)
    options = FAST.replace(prices=here / "offers.csv")
    table = gpuprof.compare_gpus(demands(here), fleet="t4,l4", policy="ffd", options=options).to_frame()
    t4, l4 = table.set_index("device").loc[["t4", "l4"]].to_dict("records")
    assert t4["price_interval"] == (0.5, 0.7) and t4["cost_per_hour"] == pytest.approx(t4["gpus"] * 0.6)
    low, high = t4["cost_per_million_interval"]
    assert low == pytest.approx(t4["cost_per_million"] * 0.5 / 0.6 * t4["gpus_at_lower_ends"] / t4["gpus"])
    assert high == pytest.approx(t4["cost_per_million"] * 0.7 / 0.6 * t4["gpus_at_upper_ends"] / t4["gpus"])
    assert l4["price_date"] == "2025-06" != t4["price_date"]  # not on offer: the shipped price
    plan = gpuprof.place(demands(here), fleet="any", policy="ffd", options=options)
    assert [entry.device.name for entry in plan.problem.fleet.entries] == ["t4", "a100-40", "a100-pcie-40"]
    assert {entry.price_per_hour for entry in plan.deployment.planned_with.fleet} == {0.6, 4.0}  # kept in the map
    captured = cli("compare --by gpu --gpus t4 --policies ffd --prices offers.csv")
    assert "interval" in captured.out and "t4 0.6 (0.5 to 0.7) $/h of 20" in captured.err


def test_wide_intervals_are_refused_under_strict(here: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    arguments = ["estimate", "mlp.onnx", "--device", "t4", "--strict"]
    strict = FAST.replace(strict=True)
    cli(*arguments)
    gpuprof.place(demands(here), fleet="t4", policy="ffd", options=strict)
    monkeypatch.setattr("gpuprof.pipeline.estimate.WIDE", 1.01)
    assert "may take" in (stderr := cli(*arguments, code=3).err) and "leave out --strict" in stderr
    with pytest.raises(InputError, match=r"mlp on t4 at batch 1 is estimated at .* may take .* \(cross-gpu: float32"):
        gpuprof.place(demands(here), fleet="t4", policy="ffd", options=strict)
    gpuprof.place(demands(here), fleet="t4", policy="ffd", options=FAST)


def test_kinds_are_compared_by_cost_with_how_sure_they_are(here: Path, cli: CommandLine) -> None:
    options = FAST.replace(confidence=0.9)
    table = gpuprof.compare_gpus(demands(here), fleet="a100-40,t4,l4", policy="ffd", options=options).to_frame()
    assert table["cost_per_hour"].is_monotonic_increasing and set(table["device"]) == {"a100-40", "t4", "l4"}
    assert table["compute_utilization"].between(0.001, 1.0).all() and (table["gpus"] >= 1).all()
    served_per_hour = 3600 * table["goodput_rps"]
    assert (table["cost_per_million"] * served_per_hour / 1e6).tolist() == pytest.approx(
        table["cost_per_hour"].tolist()
    )
    rows = cli.json("compare --by gpu --gpus t4,l4 --policies ffd")
    assert [row["device"] for row in rows] == ["t4", "l4"]
    for row in rows:  # without --confidence, too
        assert row["gpus_at_lower_ends"] <= row["gpus"] <= row["gpus_at_upper_ends"]
        assert row["sources"].endswith("predicted")
    (row,) = cli.json("compare --gpus l4 --policies ffd")
    assert row["gpus_at_lower_ends"] <= row["gpus"] <= row["gpus_at_upper_ends"]
    output = cli("compare --gpus l4 --policies ffd").out
    assert "at upper ends" in output and "predicted" in output
    cli("compare --by gpu --policies ffd,optimal", code=3)
