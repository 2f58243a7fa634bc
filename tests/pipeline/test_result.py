from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuprof.pipeline.result import Result


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
    assert "<td>1.5</td>" in html
    assert "<p>a &lt; b</p>" in html
