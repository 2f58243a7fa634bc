"""The Containerfile: what it copies is there and enough, and a builder, where there is one, builds it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprof.export.kubernetes import GRPC_PORT, HTTP_PORT

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
#: Where the development environment has its programs, whether it is activated or not.
_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
#: Instructions of a Containerfile, as `buildah` and `docker` know them.
_INSTRUCTIONS = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "ENTRYPOINT"}


def _instructions() -> list[tuple[str, str]]:
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", TEXT)).splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def test_every_line_is_an_instruction_and_each_stage_begins_from_a_named_release() -> None:
    assert {name for name, _ in _instructions()} <= _INSTRUCTIONS
    given = dict(rest.split("=", 1) for name, rest in _instructions() if name == "ARG")
    froms = [rest.split()[0] for name, rest in _instructions() if name == "FROM"]
    bases = [given["BASE"] if image == "${BASE}" else image for image in froms]
    assert bases and all("/" in base and not base.endswith(":latest") and ":" in base for base in bases)


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".containerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        word for name, rest in _instructions() if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    ]
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "gpuprof"} <= set(copied)
    assert all((ROOT / path).exists() and f"!{path}" in ignored for path in copied)


def test_it_runs_gpuprof_without_root_and_tells_the_ports_of_the_manifests() -> None:
    instructions = dict(_instructions())
    assert instructions["ENTRYPOINT"] == '["gpuprof"]'
    assert instructions["USER"].split(":")[0].isdigit() and not instructions["USER"].startswith("0")
    assert instructions["EXPOSE"].split() == [str(HTTP_PORT), str(GRPC_PORT)]


@pytest.mark.skipif(shutil.which("hadolint", path=_PATH) is None, reason="hadolint is not installed")
def test_the_linter_of_containerfiles_has_nothing_to_say() -> None:
    completed = subprocess.run(
        ["hadolint", str(ROOT / "Containerfile")],
        env={**os.environ, "PATH": _PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode, completed.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif("GPUPROF_IMAGE_TESTS" not in os.environ, reason="GPUPROF_IMAGE_TESTS is not set: fetches 1 GB")
def test_a_builder_builds_it_and_the_image_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = next((name for name in ("podman", "buildah", "docker") if shutil.which(name)), None)
    if builder is None:
        pytest.skip("no podman, buildah or docker")
    if not any(shutil.which(name) for name in ("crun", "runc")):
        monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")  # as the script does for itself
    tag = "localhost/gpuprof-test"
    build = ["bash", str(ROOT / ".ci/build-image.sh"), tag]
    completed = subprocess.run(build, capture_output=True, text=True, timeout=1400, check=False)
    assert completed.returncode == 0, completed.stderr[-2000:]
    run = [builder, "run", "--rm", tag]
    container = None
    if builder == "buildah":
        container = _words([builder, "from", tag]).strip()
        run = [builder, "run", container, "--", "gpuprof"]
    try:
        assert _words([*run, "--version"]).startswith("gpuprof ")
        assert "resnet50" in _words([*run, "zoo", "list"])
        assert "onnxruntime" in _words([*run, "doctor"])
    finally:
        if container is not None:
            _words([builder, "rm", container])


def _words(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
