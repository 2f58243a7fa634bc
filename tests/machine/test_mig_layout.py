"""Cutting GPUs with an nvidia-smi that is played: it keeps its GPUs in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuprof.errors import UnavailableError
from gpuprof.machine.mig_layout import MigLayout, apply_layout, read_layout, restore_layout

PLAYED = """#!{python}
import json, sys
path = {state!r}
state = json.load(open(path))
words = sys.argv[1:]
state["log"].append(" ".join(words))
def end(said="", code=0):
    json.dump(state, open(path, "w"))
    print(said)
    sys.exit(code)
gpu = state["gpus"][int(words[words.index("-i") + 1])]
if "--query-gpu=mig.mode.current" in words:
    end(gpu["mode"])
if state["root"] is False:
    end("Unable to change: Insufficient Permissions", 4)
if "-mig" in words:
    gpu["mode"] = "Enabled" if words[-1] == "1" else "Disabled"
    end("Enabled MIG Mode")
if "-lgi" in words:
    rows = [f"|   {{words[words.index('-i') + 1]}}  MIG {{p}}      9        {{n}}          {{s}}:4     |" for n, (p, s) in enumerate(gpu["instances"])]
    end("\\n".join(rows) or "No GPU instances found: Not Found", 0 if rows else 6)
if "-dci" in words:
    end()
if "-dgi" in words:
    gpu["instances"] = []
    end()
if "-cgi" in words:
    profile, start = words[words.index("-cgi") + 1].split(":")
    if profile in state["refused"]:
        end("Unable to create a GPU instance: Insufficient Resources", 19)
    gpu["instances"].append([profile, int(start)])
    end("Successfully created GPU instance")
end("?", 2)
"""  # noqa: E501


class Smi:
    """The played tool and its GPUs."""

    def __init__(self, directory: Path, *gpus: tuple[str, list[list[Any]]]) -> None:
        self._state = directory / "state.json"
        self.tool = str(directory / "nvidia-smi")
        self.write(
            root=True, refused=[], log=[], gpus=[{"mode": mode, "instances": instances} for mode, instances in gpus]
        )
        Path(self.tool).write_text(PLAYED.format(python=sys.executable, state=str(self._state)))
        Path(self.tool).chmod(0o755)

    def write(self, **changed: Any) -> None:
        before = json.loads(self._state.read_text()) if self._state.exists() else {}
        self._state.write_text(json.dumps({**before, **changed}))

    def gpu(self, number: int) -> Any:
        return json.loads(self._state.read_text())["gpus"][number]

    def changes(self) -> list[str]:
        log = json.loads(self._state.read_text())["log"]
        return [line for line in log if "query" not in line and "-lgi" not in line]


WANTED = MigLayout.of([("3g.40gb", 4), ("4g.40gb", 0)])


def test_a_gpu_is_cut_and_put_back(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("Enabled", []), ("Enabled", [["1g.10gb", 6], ["2g.20gb", 0]]))
    before = apply_layout(1, WANTED, smi.tool)
    assert before == MigLayout(True, (("2g.20gb", 0), ("1g.10gb", 6)))
    assert smi.gpu(1)["instances"] == [["4g.40gb", 0], ["3g.40gb", 4]]
    assert smi.gpu(0)["instances"] == []
    assert restore_layout(1, before, smi.tool) is None
    assert read_layout(1, smi.tool) == before


def test_a_gpu_that_is_so_already_is_left_alone(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("Enabled", [["3g.40gb", 4], ["4g.40gb", 0]]))
    assert apply_layout(0, WANTED, smi.tool) is None
    assert smi.changes() == []


def test_mig_is_switched_on_and_off_again(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("Disabled", []))
    before = apply_layout(0, WANTED, smi.tool)
    assert before == MigLayout(False)
    assert restore_layout(0, before, smi.tool) is None
    assert smi.gpu(0) == {"mode": "Disabled", "instances": []}
    assert smi.changes()[-3:] == ["mig -i 0 -dci", "mig -i 0 -dgi", "-i 0 -mig 0"]


def test_without_permission_it_is_said_and_nothing_changes(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("Disabled", []))
    smi.write(root=False)
    with pytest.raises(UnavailableError, match=r"Insufficient Permissions \(MIG instances are root's to make\)"):
        apply_layout(0, WANTED, smi.tool)
    assert smi.gpu(0) == {"mode": "Disabled", "instances": []}


def test_a_layout_that_fails_half_way_is_undone(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("Enabled", [["7g.80gb", 0]]))
    smi.write(refused=["3g.40gb"])
    with pytest.raises(UnavailableError, match="Insufficient Resources"):
        apply_layout(0, WANTED, smi.tool)
    assert smi.gpu(0)["instances"] == [["7g.80gb", 0]]


def test_a_gpu_without_mig_and_a_machine_without_the_tool_are_named(tmp_path: Path) -> None:
    smi = Smi(tmp_path, ("[N/A]", []))
    with pytest.raises(UnavailableError, match="GPU 0 cannot be cut"):
        apply_layout(0, WANTED, smi.tool)
    with pytest.raises(UnavailableError, match="nowhere is not installed"):
        read_layout(0, "nowhere")
