"""The task pages and those about plug-ins: their commands run one after another in an empty directory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reruns import waits_for_processes

ROOT = Path(__file__).parents[1]
TASKS = sorted((ROOT / "docs/tasks").glob("*.md"))
PLUGINS = [ROOT / "docs/write-a-policy.md", ROOT / "docs/write-an-estimator.md"]
#: Report that stands for the reader's own.
REPORT = ROOT / "tests/profiling/cases/nsys/copy_between.sqlite"

pytestmark = [pytest.mark.slow, waits_for_processes]


def test_there_are_six_pages() -> None:
    assert len(TASKS) == 6


@pytest.mark.parametrize("page", [*TASKS, *PLUGINS], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_as_they_stand(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    python = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert shell or python
    programs, folder = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    folder.mkdir()
    (programs / "gpuprof").write_text(
        f"#!{sys.executable} -P\nfrom gpuprof.cli.main import console_script\n"
        'if __name__ == "__main__":\n    console_script()\n',  # the server spawns processes, which import it
        encoding="utf-8",
    )
    (programs / "gpuprof").chmod(0o755)
    if module := re.search(r"`(my_\w+\.py)`", text):  # the page's file, which the commands import
        (folder / module[1]).write_text(python, encoding="utf-8")
    if "report.sqlite" in shell:
        shutil.copy(REPORT, folder / "report.sqlite")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    for command in (["bash", "-euc", shell], [sys.executable, "-c", python]):
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
