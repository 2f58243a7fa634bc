from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from gpuprof.pipeline.result import NoteList, Result


@dataclass(frozen=True)
class Two(Result):
    def rows(self) -> Sequence[Mapping[str, object]]:
        return [{"model": "a", "latency_ms": 1.5}, {"model": "b", "latency_ms": None}]


def test_a_result_is_a_frame_with_a_row_for_each_record() -> None:
    frame = Two().to_frame()
    assert list(frame.columns) == ["model", "latency_ms"]
    assert list(frame["model"]) == ["a", "b"]


def test_a_notebook_shows_the_rows_and_escapes_the_notes() -> None:
    html = Two(notes=("a < b",))._repr_html_()
    assert "<td>1.500</td>" in html
    assert "<p>a &lt; b</p>" in html
    assert "<td>–</td>" in html


def test_an_error_takes_the_notes_along_and_each_is_told_at_once() -> None:
    messages: list[str] = []
    with pytest.raises(ValueError, match="no more") as raised, NoteList(messages.append) as notes:
        notes.add("one", "two")
        assert messages == ["one", "two"]
        raise ValueError("no more")
    assert raised.value.__notes__ == ["one", "two"]
