"""The Containerfile: what it copies is there and enough, and a builder, where there is one, builds it."""

import re
from pathlib import Path

from gpuprof.export.kubernetes import GRPC_PORT, HTTP_PORT

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
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
