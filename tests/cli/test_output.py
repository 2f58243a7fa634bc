from __future__ import annotations

import json

import pytest

from gpuprof.cli.output import Format, make_columns, mebibytes, percent, print_json, print_rows
from gpuprof.domain.number_format import number_formatter

ROWS: list[dict[str, object]] = [
    {"model": "resnet50", "latency_ms": 12.3456, "note": ["a"]},
    {"model": "[bold]", "latency_ms": None, "note": []},
]
COLUMNS = make_columns("model latency_ms")


def test_people_get_rounded_figures_and_a_dash_for_what_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(ROWS, COLUMNS, Format.TABLE, "Models")
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()] == [
        "Models",
        "model      latency ms",
        "─────────────────────",
        "resnet50         12.3",
        "[bold]              –",
    ]


def test_programs_get_every_field_unrounded(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(ROWS, COLUMNS, Format.JSON)
    assert json.loads(capsys.readouterr().out) == ROWS
    print_rows(ROWS, COLUMNS, Format.CSV)
    assert capsys.readouterr().out == 'model,latency_ms,note\nresnet50,12.3456,"[""a""]"\n[bold],,[]\n'


def test_json_has_null_where_a_number_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": (1,)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": [1]}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1234.5, "1,234"), (0.012345, "0.0123"), (None, "–"), (float("inf"), "∞"), (99.96, "100.0"), ("x", "x")],
)
def test_numbers_are_shown_to_three_significant_digits(value: object, shown: str) -> None:
    assert number_formatter(3)(value) == shown


def test_bytes_and_fractions_have_their_own_way() -> None:
    assert mebibytes(3 * 2**20) == "3.0"
    assert percent(-0.0312) == "-3.1%"


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([5.0, 36.0, 3150.0], ["5", "36", "3,150"]),
        ([6.849, 13.4, 185.0], ["6.8", "13.4", "185.0"]),
        ([103.2, 9.8], ["103.2", "9.8"]),
        ([49.4, None, float("inf")], ["49.4", "–", "∞"]),
        ([0.0123, 0.0, 1453.2], ["0.0123", "0", "1,453.2"]),
        ([0.0, None], ["0", "–"]),
    ],
)
def test_the_numbers_of_a_column_have_one_form(values: list[object], shown: list[str]) -> None:
    assert number_formatter(3).show_column(values) == shown


_PLAN = make_columns(
    "device model figure0_bytes figure1_bytes figure2_bytes figure3_bytes figure4_bytes:figure_4 last_error"
)
_REPLICAS = [
    {
        "device": "a100-80",
        "model": model,
        **{f"figure{i}_bytes": (123456 + i) * 2**20 for i in range(5)},
        "last_error": 1.5,
    }
    for model in ("resnet50", "a" * 70)
]


@pytest.mark.parametrize("width", [80, 100, 300])
def test_a_wide_table_becomes_several_with_the_same_keys_and_whole_numbers(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_rows(_REPLICAS, _PLAN, Format.TABLE)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert all(len(line) <= max(width, 87) for line in lines)
    parts = [line for line in lines if line.startswith("resnet50") or "resnet50 " in line]
    assert [f"123,{456 + i}" in " ".join(parts) for i in range(5)] == [True] * 5
    assert (lines[0] == "device a100-80") == (width < 300) == (len(parts) > 1)
    assert ("not shown at this width: figure 4 off by" in captured.err) == (width < 300)


def test_what_all_rows_share_stands_above_with_its_heading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"model": name * 12, "share_pct": 25.0, "latency_ms": 1.0, "latency_source": "measured"}
        for name in ("net", "cat")
    ]
    monkeypatch.setenv("COLUMNS", "50")
    print_rows(rows, make_columns("model share_pct:share_% latency_ms latency_source"), Format.TABLE)
    assert capsys.readouterr().out.splitlines()[0].strip() == "share 25%; latency from measured"


def test_a_seldom_batch_size_is_not_shown_as_none() -> None:
    from gpuprof.cli.load import _histogram

    assert _histogram({1: 990, 2: 0, 3: 2, 4: 8}) == "1:99% 3:<1% 4:1%"
