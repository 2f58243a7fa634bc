from __future__ import annotations

import json
import sys

import pytest

from gpuprof.cli.output import Column, Format, chosen_format, mebibytes, percent, print_json, print_rows, say
from gpuprof.domain.number_format import number_formatter
from gpuprof.errors import InputError

ROWS: list[dict[str, object]] = [
    {"model": "resnet50", "latency_ms": 12.3456, "note": ["a"]},
    {"model": "[bold]", "latency_ms": None, "note": []},
]
COLUMNS = [Column("model", "model", right=False), Column("latency_ms", "latency ms", number_formatter(3))]


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


def test_two_formats_at_once_are_refused() -> None:
    assert chosen_format(True, False) is Format.JSON
    with pytest.raises(InputError):
        chosen_format(True, True)


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


def test_the_time_left_is_told_after_one_step() -> None:
    from rich.progress import Progress

    from gpuprof.cli.time_left import TimeLeftColumn

    clock = [100.0]
    bar, column = Progress(get_time=lambda: clock[0], disable=True), TimeLeftColumn()
    task = bar.add_task("fitting", total=3, completed=0, first=0)

    def render_time_left(after_s: float, done: int | None = None) -> str:
        clock[0] = 100.0 + after_s
        if done is not None:
            bar.update(task, completed=done, paced_s=bar.tasks[0].elapsed)
        return column.render(bar.tasks[0]).plain

    assert render_time_left(5.0, 0) == "-:--:--"
    assert render_time_left(20.0, 1) == "0:00:40"
    assert render_time_left(25.0) == "0:00:35"
    assert render_time_left(90.0) == "-:--:--"  # the step is late: nothing is known of its end
    assert render_time_left(100.0, 2) == "0:00:50"


def test_steps_that_were_done_before_do_not_count_for_the_time_left() -> None:
    from rich.progress import Progress

    from gpuprof.cli.time_left import TimeLeftColumn

    clock = [0.0]
    bar = Progress(get_time=lambda: clock[0], disable=True)
    task = bar.add_task("profiling", total=10, completed=6, first=6)
    clock[0] = 8.0
    bar.update(task, completed=8, paced_s=8.0)
    assert TimeLeftColumn().render(bar.tasks[0]).plain == "0:00:08"


@pytest.mark.parametrize("width", [80, 100, 140])
def test_errors_of_estimates_have_one_form_and_a_line_each(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuprof.cli.evaluate import _COLUMNS

    monkeypatch.setenv("COLUMNS", str(width))
    rows = [
        {"setting": setting, "quantity": quantity, "predictor": "gradient_boosting", "count": 316, "mean_pct": mean,
         "median_pct": mean, "p95_pct": 1270.95, "coverage_pct": None}
        for setting, quantity, mean in (
            ("architecture", "latency", 64.422), ("batch size", "memory", 0.099)
        )
    ]  # fmt: skip
    print_rows(rows, _COLUMNS, Format.TABLE)
    shown = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in shown)
    lines = [line.split() for line in shown if "gradient_boosting" in line]
    assert lines[0][:3] == ["architecture", "latency", "gradient_boosting"]
    assert lines[1][:4] == ["batch", "size", "memory", "gradient_boosting"]
    assert lines[0][4:7] == ["64.4", "64.4", "1,271.0"] and lines[1][5:8] == ["0.1", "0.1", "1,271.0"]
    assert len(lines) == (4 if width == 80 else 2)


def test_a_percentage_above_a_table_has_its_sign_behind_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuprof.cli.table import ColumnRole

    columns = [
        Column("model", "model", right=False, role=ColumnRole.SUBJECT),
        Column("share_pct", "share %", number_formatter(), role=ColumnRole.KEY),
        Column("source", "from", right=False),
    ]
    rows = [{"model": name, "share_pct": 25.0, "source": name * 12} for name in ("net", "cat")]
    monkeypatch.setenv("COLUMNS", "40")
    print_rows(rows, columns, Format.TABLE)
    assert capsys.readouterr().out.splitlines()[0].strip() == "share 25%"


def test_a_seldom_batch_size_is_not_shown_as_none() -> None:
    from gpuprof.cli.load import _histogram

    assert _histogram({1: 990, 2: 0, 3: 2, 4: 8}) == "1:99% 3:<1% 4:1%"


def test_a_comparison_stands_in_one_table_at_100_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuprof.cli.compare import _COLUMNS

    monkeypatch.setenv("COLUMNS", "100")
    row = {"policy": "mig-serving", "gpus": 12, "cost_per_hour": 41.172, "goodput_rps": 1500.0, "missing_rps": 0.0,
           "internal_slack": 0.0000069, "external_fragmentation": 0.634, "fairness": 0.93, "seconds": 11.02,
           "gpus_at_lower_ends": 11, "gpus_at_upper_ends": 14,
           "sources": "3 replicas (100% of the requests) predicted"}  # fmt: skip
    columns = [one for one in _COLUMNS if one.key not in ("lower_bound_gpus", "remark")]
    print_rows([row, row | {"policy": "ffd", "internal_slack": 0.41}], columns, Format.TABLE)
    told = capsys.readouterr()
    lines = [line.split() for line in told.out.splitlines() if line.startswith(("ffd", "mig-serving"))]
    assert len(lines) == 2 and all(len(line) <= 100 for line in told.out.splitlines())
    assert lines[0][5:7] == ["0%", "63%"] and lines[1][5:7] == ["41%", "63%"]
    assert not told.err and all(line[8:10] == ["11", "14"] for line in lines)


def test_what_is_said_on_stderr_breaks_between_words_in_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "gpuprof: the file /a/very/long/path/that/no/terminal/of/this/width/holds is-not there"
    monkeypatch.setenv("COLUMNS", "30")
    say(line)
    assert capsys.readouterr().err == f"{line}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say(line)
    assert capsys.readouterr().err.splitlines() == [
        "gpuprof: the file",
        "/a/very/long/path/that/no/terminal/of/this/width/holds",
        "is-not there",
    ]
