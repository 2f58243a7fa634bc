"""Gives the package index README.md with links that lead into the repository; all else is in pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def absolute_links(markdown: str, repository: str) -> str:
    """Return the text with every link and picture that is relative made absolute."""
    markdown = re.sub(r"!\[([^]]*)\]\((?![a-z]+:|#)([^)]+)\)", rf"![\1]({repository}/raw/HEAD/\2)", markdown)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?![a-z]+:|#)([^)]+)\)", rf"[\1]({repository}/blob/HEAD/\2)", markdown)


project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
setup(
    long_description=absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), project["urls"]["Repository"]),
    long_description_content_type="text/markdown",
)
