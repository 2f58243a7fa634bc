from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.cli.output import Column, Format, number, print_rows
from gpuprof.cli.table import GAP, lay_out_columns

_WORDS = st.text("abc 0123456789,", max_size=30)


@given(
    st.lists(st.tuples(_WORDS, _WORDS, st.booleans()), min_size=1, max_size=12),
    st.integers(min_value=20, max_value=200),
)
def test_every_column_stands_once_whole_and_within_the_terminal(
    columns: list[tuple[str, str, bool]], width: int
) -> None:
    headings, cells, right = [c[0] for c in columns], [c[1] for c in columns], [c[2] for c in columns]
    tables = lay_out_columns(headings, [cells], right, width)
    assert [place.position for table in tables for place in table[bool(table is not tables[0]) :]] == [
        *range(len(columns))
    ]
    for table in tables:
        assert table[0].position == 0
        assert all(place.width >= len(cells[place.position]) for place in table if right[place.position])
        assert len(table) <= 2 or sum(place.width + GAP for place in table) - GAP <= width


def test_no_number_is_broken_at_forty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = [Column("model", "model", right=False), *(Column(f"k{i}", f"figure {i}", number(6)) for i in range(6))]
    print_rows([{"model": "net", **{f"k{i}": 105883.0 + i for i in range(6)}}], shown, Format.TABLE)
    printed = capsys.readouterr().out
    assert all(f"{105883 + i:,}" in printed for i in range(6))
    assert max(map(len, printed.splitlines())) <= 40
    assert printed.count("net") > 1
