"""The notebooks of docs/notebooks: their cells run one after another in an empty folder, and show what they say."""

import ast
import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from tests.reruns import measures_in_real_time

FOLDER = Path(__file__).parents[1] / "docs/notebooks"
NAMES = ("compare_policies", "profile_and_look", "which_gpu")


def _run(name: str) -> tuple[dict[str, Any], list[Any]]:
    """Run the code cells; return their variables, and the values that they end with, as Jupyter shows them."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    world: dict[str, Any] = {}
    shown: list[Any] = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), world)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), name, "eval"), world))  # type: ignore[attr-defined]
    return world, shown


def test_the_notebooks_are_these_three_and_hold_no_output() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)
    for name in NAMES:
        document = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
        assert document["nbformat"] == 4
        assert document["cells"][0]["source"][0].startswith("# ")
        assert all(not cell.get("outputs") for cell in document["cells"])  # figures age; whoever reads runs it


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@measures_in_real_time
@pytest.mark.slow
def test_profile_and_look_measures_both_models_and_writes_a_page() -> None:
    world, shown = _run("profile_and_look")
    assert set(world["table"]["model"]) == {"mlp", "other"} and set(world["table"]["batch"]) == {1, 2, 4}
    assert (world["ops"]["ms"] > 0).all()
    assert any(
        {"latency_low_ms", "latency_high_ms"} <= set(frame) for frame in shown if isinstance(frame, pandas.DataFrame)
    )
    assert Path(world["page"]).is_file()
    assert sum(isinstance(frame, pandas.DataFrame) and len(frame) > 0 for frame in shown) == 4


@pytest.mark.slow
def test_which_gpu_finds_the_cheapest_kind_and_plans_for_it() -> None:
    world, shown = _run("which_gpu")
    assert {"latency_low_ms", "latency_high_ms"} <= set(shown[0])  # the interval that the text speaks of
    costs = world["costs"]
    assert set(costs["device"]) == set(world["kinds"])
    assert world["cheapest"] == costs.loc[costs["cost_per_hour"].idxmin(), "device"]
    assert (
        shown[-1].name == "map.json"
        and world["plan"].is_complete
        and set(world["plan"].to_frame()["device"]) == {world["cheapest"]}
    )


@pytest.mark.slow
def test_compare_policies_places_and_simulates_the_same_demands() -> None:
    world, _ = _run("compare_policies")
    assert list(world["compared"].to_frame()["policy"]) == world["names"]
    assert set(world["seen"]["policy"]) == {"ffd", "optimal"} and (world["seen"]["goodput_rps"] > 0).all()
