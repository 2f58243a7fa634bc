"""Which models there are, by the names that clients send."""

from __future__ import annotations

import difflib
from typing import Any, cast

import pytest

from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.inference import RefusedError


def test_of_an_unknown_name_only_the_beginning_is_compared_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []

    def find_near(name: str, names: list[str], **how: Any) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", find_near)
    with pytest.raises(RefusedError, match="unknown model"):
        Router(cast(Any, None)).find("m" * 200_000)
    assert [len(name) for name in compared] == [100]
