"""The import directions between packages, and what ``import gpuprof`` may cost."""

import ast
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import gpuprof

PACKAGE = Path(gpuprof.__file__).parent
_DOMAIN = {"core", "domain"}
_READING = _DOMAIN | {"rules", "graph"}
_RUNNING = _READING | {"runtime", "machine"}
#: Layer by layer, what each package may import beside itself; "core" are the loose files at the top.
ALLOWED = {
    "core": set[str](),
    "domain": {"core"},
    "rules": _DOMAIN,
    "graph": _DOMAIN | {"rules"},
    "runtime": _READING,
    "machine": _READING | {"runtime"},
    "zoo": _RUNNING,
    "kernel_db": _RUNNING,
    "profiling": _RUNNING | {"kernel_db"},
    "estimators": _RUNNING | {"kernel_db"},
    "placement": _RUNNING,
    "merging": _RUNNING,
    "simulator": _RUNNING,
    "serving": _RUNNING,
    "load": _RUNNING | {"serving"},
    "export": _RUNNING | {"placement", "serving"},
    "reporting": _RUNNING | {"kernel_db"},
    "pipeline": _RUNNING
    | {
        "zoo",
        "kernel_db",
        "profiling",
        "estimators",
        "placement",
        "merging",
        "simulator",
        "serving",
        "load",
        "export",
        "reporting",
    },
    "lab": _RUNNING | {"kernel_db", "estimators", "placement", "simulator", "reporting", "pipeline"},
}
#: The subpackages of the larger parts: each imports only those before it.
SUBPACKAGES = {
    "profiling": ("timeline", "worker", "cpu", "nsight", "gpu", "sweep"),
    "estimators": ("cross_gpu", "measured", "learned", "igniter", "interference", "queueing"),
    "placement": ("published", "optimal"),
    "serving": ("transport", "watch", "worker", "machine", "router", "protocol", "edge", "plan", "change"),
}
FACADES = {"__init__", "__main__"}
HEAVY = ("torch", "onnxruntime", "sklearn", "pyarrow", "onnx", "duckdb", "pandas", "scipy")


def _part(dotted: str) -> str:
    words = dotted.split(".")
    return words[1] if len(words) > 1 and (PACKAGE / words[1]).is_dir() else "core"


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "gpuprof"}


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_a_module_imports_only_what_its_part_may() -> None:
    for path in _sources():
        part = _part("gpuprof." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        if part == "cli" or (part == "core" and path.stem in FACADES):
            continue
        parts = {_part(name) for name in _imports(path)} - {part}
        assert parts <= ALLOWED[part], f"{path}: {part} may not import {sorted(parts - ALLOWED[part])}"


@pytest.mark.parametrize("part", SUBPACKAGES)
def test_a_subpackage_imports_only_those_before_it(part: str) -> None:
    subpackages = SUBPACKAGES[part]
    assert {path.name for path in (PACKAGE / part).iterdir() if (path / "__init__.py").exists()} == set(subpackages)
    for subpackage in subpackages:
        for path in (PACKAGE / part / subpackage).rglob("*.py"):
            words = {tuple(name.split(".")[1:3]) for name in _imports(path)}
            used = {name[1] for name in words if len(name) == 2 and name[0] == part and name[1] in subpackages}
            assert used <= set(subpackages[: subpackages.index(subpackage) + 1]), f"{path} imports {sorted(used)}"


def test_few_files_stand_loose_at_the_top() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py", "plugins.py"}


def test_every_part_has_its_rule() -> None:
    parts = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert parts - {"cli"} <= set(ALLOWED)


@pytest.mark.parametrize("code", ["import gpuprof", "from gpuprof.cli.main import main; main(['--help'])"])
def test_importing_gpuprof_loads_no_heavy_library(code: str) -> None:
    check = f"{code}\nimport sys\nprint([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    completed = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert completed.stderr.strip().splitlines()[-1] == "[]"


def test_the_public_names_are_all_there() -> None:
    for name in gpuprof.__all__:
        assert getattr(gpuprof, name) is not None
    assert set(dir(gpuprof)) == set(gpuprof.__all__)


def test_tools_see_the_public_names_where_they_are() -> None:
    """The imports that only type checkers follow, against the names that are imported when they are used."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    public = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert public == {name: inspect.unwrap(getattr(gpuprof, name)).__module__ for name in public}
    assert {*public, "__version__"} == set(gpuprof.__all__)


def test_no_two_public_classes_share_a_name() -> None:
    definitions: dict[str, list[str]] = {}
    for path in _sources():
        for node in _parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                definitions.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in definitions.items() if len(places) > 1} == {}
