"""docs/library.md: its blocks are run as they stand, and it names every public verb."""

import codeop
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import gpuprof
from tests.reruns import measures_in_real_time

PAGE = Path(__file__).parent.parent / "docs" / "library.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@measures_in_real_time
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_blocks_of_the_page_run_one_after_another(here: Path) -> None:
    world: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), world)
    assert world["plan"].is_complete
    assert {row["model"] for row in world["load"].rows()} == {"mlp", "squeezenet"}
    assert [row["policy"] for row in world["following"].rows()] == ["ffd", "optimal"]
    assert {"map.json", "trace.csv", "load.json", "exported"} <= {path.name for path in here.iterdir()}


def test_each_block_can_be_pasted_into_an_interpreter() -> None:
    for block in BLOCKS:
        paste, lines = codeop.CommandCompiler(), []
        for line in [*block.splitlines(), ""]:  # which takes statements one by one, and ends a body at an empty line
            lines.append(line)
            if paste("\n".join(lines), symbol="single") is not None:
                lines = []
        assert not lines


def test_the_page_names_every_public_function() -> None:
    text = PAGE.read_text(encoding="utf-8")
    functions = [name for name in gpuprof.__all__ if inspect.isfunction(getattr(gpuprof, name))]
    missing = [name for name in functions if not re.search(rf"\b{name}\b", text)]
    assert missing == [] or set(missing) <= {"read_demands"}
