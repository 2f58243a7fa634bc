"""The wheel holds exactly what the tree holds, and runs where the tree is not."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from gpuprof.errors import DISTRIBUTION
from tests.reruns import installs_packages

ROOT = Path(__file__).parents[1]
pytestmark = [installs_packages, pytest.mark.slow]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would add what an earlier build left there
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (built,) = out.glob("*.whl")
    return built


def _in_tree() -> set[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "gpuprof"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in listed if (ROOT / name).is_file()}


def test_the_wheel_holds_exactly_what_the_tree_holds(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert names == _in_tree()


def test_what_an_index_shows_of_it_links_into_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (metadata for metadata in archive.namelist() if metadata.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    assert metadata["Name"] == DISTRIBUTION
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= set(urls)
    links = re.findall(r"\]\(([^)]+)\)", str(metadata.get_payload()))
    assert len(links) > 5 and all(link.startswith(f"{urls['Repository']}/") for link in links)
    for link in links:
        assert (ROOT / link.removeprefix(urls["Repository"]).split("/HEAD/")[1]).exists()


def test_it_runs_installed_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*words: str) -> str:
        completed = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    assert Path(run("-c", "import gpuprof; print(gpuprof.__file__)").strip()).is_relative_to(site)
    assert run("-m", "gpuprof", "--version").startswith("gpuprof ")
    run("-m", "gpuprof", "zoo", "build", "squeezenet", "-o", "squeezenet.onnx")
    estimate = run("-m", "gpuprof", "estimate", "squeezenet.onnx", "--batch", "8", "--device", "a100-80", "--json")
    assert '"cross-gpu: tfloat32, onnxruntime, never compared on this board"' in estimate
