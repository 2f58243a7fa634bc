"""Output of ``gpuprof load``: verdicts, reasons, tables in terminals of several widths, Markdown and JUnit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gpuprof.cli.load import _show
from gpuprof.cli.output import Format
from gpuprof.errors import SloMissedError
from gpuprof.load.load import LoadOutcome
from gpuprof.load.report import ModelResult
from gpuprof.pipeline.load import LoadResult

_MEASURED: dict[str, Any] = {"slo_ms": 100.0, "answered": 2000, "in_slo": 1990, "rate_rps": 100.0, "goodput_rps": 99.5}
_TIMES: dict[str, Any] = {"mean_ms": 12.3, "p50_ms": 12.1, "p95_ms": 22.2, "p99_ms": 33.3, "lag_p99_ms": 0.1}
_MODELS = (
    ModelResult("resnet50_of_the_shop", sent=2049, refused=0, failed=31, lost=18, **_MEASURED, **_TIMES),
    ModelResult("bert_base_of_the_shop", sent=2000, refused=0, failed=0, lost=0, **_MEASURED, **_TIMES),
)


def result_of(*models: ModelResult, **fields: Any) -> LoadResult:
    return LoadResult(outcome=LoadOutcome(list(models), [{"model": model.model} for model in models], 1), **fields)


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_the_verdict_comes_first_with_its_reason(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert lines[0].startswith("| model | verdict |") and len(lines) == 4
    assert lines[2].startswith("| resnet50_of_the_shop | missed |") and "| kept | 99.50 |" in lines[3]
    result.write(tmp_path / "verdicts.xml")
    (suite,) = ElementTree.parse(tmp_path / "verdicts.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "0")
    missed, kept = suite
    assert missed.get("name") == "resnet50_of_the_shop" and len(kept) == 0
    (failure,) = missed
    assert "31 failed" in str(failure.get("message")) and "slo_ms=100.0" in str(failure.text)
