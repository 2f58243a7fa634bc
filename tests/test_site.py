"""The site: it builds with warnings as errors, and the guide says what the code says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpuprof
from gpuprof import errors
from gpuprof.cli.main import INTERRUPTED_EXIT_CODE, VERBS
from gpuprof.domain import demand
from gpuprof.placement.policies import BUILTIN

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/guide.md").read_text(encoding="utf-8")


def _first_cells(heading: str) -> list[str]:
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    assert section is not None, f"the guide has no section {heading}"
    rows = [line for line in section[1].splitlines() if line.startswith("|")]
    return [row.split("|")[1].strip().strip("`") for row in rows[2:]]


def test_the_pages_stay_short() -> None:
    generated = {"commands.md", "devices.md"}
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name not in generated]
    words = {path: len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "README.md", *pages)}
    assert words[ROOT / "README.md"] <= 900
    assert sum(words.values()) + len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split()) <= 20_000


def test_the_guide_has_every_column_of_slo_csv_and_no_other() -> None:
    assert set(_first_cells("slo.csv")) == {*demand._REQUIRED, *demand._OPTIONAL}


def test_the_guide_has_every_exit_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.GpuprofError)]
    codes = {0, errors.BUG_EXIT_CODE, INTERRUPTED_EXIT_CODE, *(kind.exit_code for kind in kinds)}
    assert {int(cell) for cell in _first_cells("Exit codes")} == codes


def test_the_guide_has_every_environment_variable_that_users_set() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "gpuprof").rglob("*.py"))
    read = set(re.findall(r"environ[^\n]*[\"'](GPUPROF_\w+)", sources)) | set(
        re.findall(r"envvar=[\"'](\w+)[\"']", sources)
    )
    assert {"GPUPROF_DB", "GPUPROF_TOKEN", "GPUPROF_DEBUG", "RAY_ADDRESS"} <= set(_first_cells("Environment variables"))
    assert read <= set(_first_cells("Environment variables"))


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_what_is_filled_in(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert completed.returncode == 0, completed.stderr
    guide = (tmp_path / "site/guide/index.html").read_text(encoding="utf-8")
    assert all(f"<code>{name}</code>" in guide for name in BUILTIN)
    assert "gpuprof_latency_seconds" in guide and "internal slack" in guide and "&lt;!--" not in guide
    commands = (tmp_path / "site/commands/index.html").read_text(encoding="utf-8")
    assert all(f"gpuprof {verb}" in commands for verb in VERBS)
    reference = (tmp_path / "site/reference/index.html").read_text(encoding="utf-8")
    public = [getattr(gpuprof, name) for name in gpuprof.__all__ if name != "__version__"]
    missing = [
        definition.__qualname__
        for definition in public
        if f'id="{definition.__module__}.{definition.__qualname__}"' not in reference
    ]
    assert missing == []
