"""What ARCHITECTURE.md and the pages of docs/ name in code type is there: files, packages, functions and classes."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("gpuprof", "bench", "tests")
PAGES = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Files of the reader.
FOREIGN = frozenset({"my_policy.py", "my_estimator.py"})


@cache
def list_sources() -> list[Path]:
    return [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]


@cache
def list_known_names() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", " ".join(path.read_text() for path in list_sources())))


def list_code_words(page: str) -> list[str]:
    """Return what stands between single backticks, commands in fences left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))


def find_sources(named: str) -> list[Path]:
    """Return the files that ``a/b.py`` may mean: pages leave out the folders above."""
    return [path for path in list_sources() if f"/{path.relative_to(ROOT).as_posix()}".endswith(f"/{named}")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_package_that_a_page_names_is_there(page: Path) -> None:
    words = [word for word in list_code_words(page.read_text()) if word not in FOREIGN]
    missing = [word for word in words if re.fullmatch(r"[\w/]+\.py", word) and not find_sources(word)]
    folders = {f"/{path.relative_to(ROOT).as_posix()}/" for path in ROOT.glob("[a-z]*/**/") if path.is_dir()}
    folders |= {f"/{path.name}/" for path in ROOT.iterdir() if path.is_dir()}
    packages = [word for word in words if re.fullmatch(r"[\w/]+/", word)]
    missing += [word for word in packages if not any(folder.endswith(f"/{word}") for folder in folders)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_that_a_page_gives_in_code_type_is_in_the_code(page: Path) -> None:
    names = [word for word in list_code_words(page.read_text()) if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", word)]
    parts = [(name, name.removesuffix("()").split(".")[-1]) for name in names if name not in FOREIGN]
    assert [name for name, last in parts if last not in list_known_names()] == []


def test_every_rule_of_the_architecture_stands_in_the_file_that_the_table_gives() -> None:
    rows = [line.split("|") for line in PAGES[0].read_text().splitlines() if line.count("|") == 4]
    wrong = []
    for _, rule, where, _, _ in rows:
        words = list_code_words(where)
        texts = [path.read_text() for word in words if word.endswith(".py") for path in find_sources(word)]
        names = [word.split(".")[-1] for word in words if re.fullmatch(r"[A-Za-z_][\w.]*", word) and ".py" not in word]
        wrong += [(rule.strip(), name) for name in names if texts and not any(name in text for text in texts)]
    assert 10 <= len(rows) <= 60 and wrong == []
