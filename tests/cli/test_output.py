import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gpuprof.cli.load import _show
from gpuprof.cli.output import Format, print_json, print_rows
from gpuprof.domain.number_format import NumberFormat
from gpuprof.domain.table import make_columns, mebibytes, percent
from gpuprof.errors import SloMissedError
from gpuprof.load.load import LoadOutcome
from gpuprof.load.report import ModelResult
from gpuprof.pipeline.load import LoadResult

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
    assert NumberFormat(3)(value) == shown


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
    assert NumberFormat(3).show_column(values) == shown


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
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= max(width, 87) for line in lines)
    parts = [line for line in lines if line.startswith("resnet50") or "resnet50 " in line]
    assert [f"123,{456 + i}" in " ".join(parts) for i in range(5)] == [True] * 5
    assert (lines[0] == "device: a100-80") == (width < 300) == (len(parts) > 1)


def test_a_seldom_batch_size_is_not_shown_as_none() -> None:
    from gpuprof.cli.load import _histogram

    assert _histogram({1: 990, 2: 0, 3: 2, 4: 8}) == "1:99% 3:<1% 4:1%"


_MEASURED: dict[str, Any] = {"slo_ms": 100.0, "answered": 2000, "in_slo": 1990, "rate_rps": 100.0, "goodput_rps": 99.5}
_TIMES: dict[str, Any] = {"mean_ms": 12.3, "p50_ms": 12.1, "p95_ms": 22.2, "p99_ms": 33.3, "lag_p99_ms": 0.1}
_MODELS = (
    ModelResult("resnet50_of_the_shop", sent=2049, refused=0, failed=31, lost=18, **_MEASURED, **_TIMES),
    ModelResult("bert_base_of_the_shop", sent=2000, refused=0, failed=0, lost=0, **_MEASURED, **_TIMES),
)


def result_of(*models: ModelResult, **fields: Any) -> LoadResult:
    return LoadResult(outcome=LoadOutcome(list(models), [{"model": model.model} for model in models], 1), **fields)


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_verdicts_come_first(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    _show(result_of(*_MODELS), Format.TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 8 and all(len(line) <= width for line in lines)
    missed, kept = (next(line for line in lines if line.startswith(f"{model.model} ")) for model in _MODELS)
    assert "missed" in missed.split() and "33.3" in missed.split() and "kept" in kept.split()
    assert "resnet50_of_the_shop: of 2,049 requests 31 failed, 18 without an answer" in " ".join(lines)
    assert not any(line.startswith("bert_base_of_the_shop:") for line in lines)


def test_a_missed_slo_is_an_error_and_one_without_an_objective_is_not() -> None:
    with pytest.raises(SloMissedError, match="1 of 2 models missed the SLO: resnet50_of_the_shop") as missed:
        result_of(*_MODELS).require_kept()
    assert missed.value.exit_code == 1 and "--no-fail" in missed.value.fix
    result_of(_MODELS[1]).require_kept()
    result_of(*_MODELS, percentiles={"resnet50_of_the_shop": 97.0}).require_kept()  # 1,990 of 2,049 are 97.1%
    result_of(*_MODELS, is_closed=True).require_kept()
    (verdict,) = result_of(replace(_MODELS[0], slo_ms=float("inf"))).verdicts()
    assert verdict.kept is None and verdict.verdict == "not judged"


def test_the_reason_of_late_answers_is_where_the_slowest_took_their_time() -> None:
    late = replace(_MODELS[1], in_slo=1900, slowest_ms=150.0, slowest_late_ms=0.1, slowest_network_ms=1.0)
    late = replace(late, slowest_router_ms=0.4, slowest_queue_ms=138.0, slowest_infer_ms=10.5)
    (verdict,) = result_of(late).verdicts()
    assert verdict.kept is False
    assert verdict.reason == "of the slowest 1% (150.0 ms) 138.0 ms went into waiting for a worker"
    (verdict,) = result_of(replace(late, slowest_ms=None)).verdicts()
    assert verdict.reason == "100 of 2,000 answers came after 100 ms"
    (verdict,) = result_of(replace(late, lag_p99_ms=30.0)).verdicts()
    assert verdict.reason == "the client itself sent late (p99 30.0 ms)"


def test_verdicts_are_written_as_markdown_and_junit(tmp_path: Path) -> None:
    result = result_of(*_MODELS)
    result.write(tmp_path / "verdicts.md")
    lines = (tmp_path / "verdicts.md").read_text().splitlines()
    assert lines[0].startswith("| model | SLO |") and len(lines) == 4
    assert lines[2].startswith("| resnet50_of_the_shop | missed |") and "| kept | 99.50 |" in lines[3]
    result.write(tmp_path / "verdicts.xml")
    (suite,) = ElementTree.parse(tmp_path / "verdicts.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "0")
    missed, kept = suite
    assert missed.get("name") == "resnet50_of_the_shop" and len(kept) == 0
    (failure,) = missed
    assert "31 failed" in str(failure.get("message")) and "slo_ms=100.0" in str(failure.text)


def test_a_text_of_all_rows_stands_above(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    columns = make_columns("model rate latency_source:from")
    long = "predicted for an unmeasured board by launches"

    def print_table(*sources: str) -> str:
        rows = [{"model": f"m{number}", "rate": 5.0, "latency_source": source} for number, source in enumerate(sources)]
        print_rows(rows, columns, Format.TABLE)
        return capsys.readouterr().out

    assert " ".join(print_table(long, long).split()).startswith(f"from: {long} model rate")
    assert "from:" not in print_table(long, "measured")
    assert "from:" not in print_table(long)
