from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.cli.output import Column, Format, print_rows, print_text
from gpuprof.cli.table import GAP, ColumnRole, ColumnText, lay_out_columns
from gpuprof.domain.number_format import number_formatter

_WORDS = st.text("abc 0123456789,", max_size=30)
_COLUMN = st.builds(
    ColumnText, _WORDS, st.tuples(_WORDS, _WORDS), st.booleans(), st.sampled_from(ColumnRole), st.booleans()
)


@given(st.lists(_COLUMN, min_size=1, max_size=12), st.integers(min_value=20, max_value=200))
def test_every_column_is_shown_once_or_said_above_or_left_out(columns: list[ColumnText], width: int) -> None:
    layout = lay_out_columns(columns, width)
    places = [place.position for table in layout.tables for place in table]
    assert sorted({*places, *layout.above, *layout.left_out}) == [*range(len(columns))]
    assert not {*places} & {*layout.above, *layout.left_out}
    repeated = {position for position in places if places.count(position) > 1}
    for table in layout.tables:
        assert repeated <= {place.position for place in table}  # each part has the keys of its rows
        assert all(
            place.width >= len(columns[place.position].cells[0]) for place in table if columns[place.position].right
        )
    if layout.above:  # nothing is moved where no text is broken
        assert sum(column.full + GAP for column in columns) - GAP > width
    if len(layout.tables) > 1 or layout.left_out:  # nor parted or left out where all have room
        assert sum(column.least + GAP for column in columns) - GAP > width


def test_what_is_the_same_in_every_row_goes_above_before_a_text_is_broken() -> None:
    shares = ColumnText("share", ("10%", "20%"), role=ColumnRole.KEY)
    source = ColumnText("from", ("cross-gpu: tfloat32, fused",) * 2, right=False)
    assert lay_out_columns([shares, source], 40).above == ()
    assert lay_out_columns([shares, source], 25).above == (1,)  # broken between its words it would have room


@given(st.lists(_COLUMN, min_size=1, max_size=12), st.integers(min_value=20, max_value=200))
def test_only_what_is_the_same_in_all_rows_goes_above_and_only_what_follows_is_left_out(
    columns: list[ColumnText], width: int
) -> None:
    layout = lay_out_columns(columns, width)
    assert all(len(set(columns[position].cells)) == 1 for position in layout.above)
    assert not any(columns[position].role is ColumnRole.SUBJECT for position in layout.above)
    assert all(columns[position].role is ColumnRole.DERIVED for position in layout.left_out)


_PLAN = (
    Column("node", "node", right=False, role=ColumnRole.KEY),
    Column("device", "device", right=False, role=ColumnRole.KEY),
    Column("model", "model", right=False, role=ColumnRole.SUBJECT),
    Column("batch", "batch", role=ColumnRole.KEY),
    *(Column(f"figure{i}", f"figure{i}", number_formatter(6)) for i in range(5)),
    Column("error", "error", number_formatter(6), role=ColumnRole.DERIVED, joined=True),
)
_ROWS = [
    {"node": f"node{i % 2}", "device": "a100-80", "model": "resnet50", "batch": 2**i, "error": 123.456}
    | {f"figure{k}": 123456.0 for k in range(5)}
    for i in range(3)
]


@pytest.mark.parametrize("width", [70, 60])
def test_every_row_of_every_part_names_model_and_batch_and_what_is_the_same_stands_above(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_rows(_ROWS, _PLAN, Format.TABLE)
    printed, said = capsys.readouterr()
    above, *tables = printed.splitlines()
    assert above == "device a100-80"
    rows = [line for line in tables if "123,456" in line]
    assert len(rows) >= 3 and all("resnet50" in row and row.split()[2] in "124" for row in rows)
    assert "figure4 error" in said and "error" not in printed
    assert max(map(len, printed.splitlines())) <= width


def test_columns_stand_closer_where_the_table_then_stays_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [Column("model", "model", right=False), *(Column(f"k{i}", "figure", number_formatter(6)) for i in range(6))]
    row = {"model": "net", **{f"k{i}": 105883.0 for i in range(6)}}
    monkeypatch.setenv("COLUMNS", str(5 + 6 * (7 + 2)))
    print_rows([row], plain, Format.TABLE)
    closer = capsys.readouterr().out.splitlines()
    assert closer[-1] == "net    " + "  ".join(["105,883"] * 6) and len(closer) == 3
    monkeypatch.setenv("COLUMNS", "80")
    print_rows([row], plain, Format.TABLE)
    assert "   ".join(["105,883"] * 6) in capsys.readouterr().out


def test_a_table_that_has_room_is_one_with_all_its_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    print_rows(_ROWS, _PLAN, Format.TABLE)
    printed, said = capsys.readouterr()
    assert said == "" and len(printed.splitlines()) == 5 and printed.count("a100-80") == 3


def test_no_number_is_broken_at_forty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = [
        Column("model", "model", right=False),
        *(Column(f"k{i}", f"figure {i}", number_formatter(6)) for i in range(6)),
    ]
    print_rows([{"model": "net", **{f"k{i}": 105883.0 + i for i in range(6)}}], shown, Format.TABLE)
    printed = capsys.readouterr().out
    assert all(f"{105883 + i:,}" in printed for i in range(6))
    assert max(map(len, printed.splitlines())) <= 40
    assert printed.count("net") > 1


def test_columns_without_roles_repeat_the_first_that_tell_rows_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = [
        Column("model", "model", right=False),
        Column("share", "share"),
        Column("batch", "batch"),
        *(Column(f"figure{i}", f"figure{i}", number_formatter(6)) for i in range(8)),
    ]
    rows = [
        {"model": model, "share": 25, "batch": batch} | {f"figure{i}": 123456.0 + i for i in range(8)}
        for model in ("net", "other")
        for batch in (1, 2)
    ]
    print_rows(rows, shown, Format.TABLE)
    told = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if "123,4" in line]
    assert len(told) > 4
    assert told[-4:] == [["net", "1"], ["net", "2"], ["other", "1"], ["other", "2"]]  # the last part


def test_a_line_of_text_is_broken_between_words_in_a_terminal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "2 × a100-80 ($6.86/h), proven minimum. " * 8 + "[1/2] done."
    monkeypatch.delenv("COLUMNS", raising=False)
    print_text(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv("COLUMNS", "60")
    print_text(text)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60 and " ".join(line.strip() for line in lines) == text


def test_where_the_only_row_is_from_goes_above_and_its_figure_stays() -> None:
    model = ColumnText("model", ("net",), right=False, role=ColumnRole.SUBJECT)
    latency, source = ColumnText("latency", ("0.73",)), ColumnText("from", ("learned",), right=False, joined=True)
    assert lay_out_columns([model, latency, source], 40).above == ()
    assert lay_out_columns([model, latency, source], 20).above == (2,)
