"""What ``gpuprof load`` prints in terminals of several widths: what was not answered is seen in all of them."""

from __future__ import annotations

from typing import Any

import pytest

from gpuprof.cli.load import _show
from gpuprof.cli.output import Format
from gpuprof.load.load import LoadOutcome
from gpuprof.load.report import ModelResult
from gpuprof.pipeline.load import LoadResult

_MEASURED: dict[str, Any] = {"slo_ms": 100.0, "answered": 2000, "in_slo": 1990, "rate_rps": 100.0, "goodput_rps": 99.5}
_TIMES: dict[str, Any] = {"mean_ms": 12.3, "p50_ms": 12.1, "p95_ms": 22.2, "p99_ms": 33.3, "lag_p99_ms": 0.1}
_MODELS = (
    ModelResult("resnet50_of_the_shop", sent=2049, refused=0, failed=31, lost=18, **_MEASURED, **_TIMES),
    ModelResult("bert_base_of_the_shop", sent=2000, refused=0, failed=0, lost=0, **_MEASURED, **_TIMES),
)


@pytest.mark.parametrize("width", [80, 100, 110, 140, 200])
def test_what_failed_is_seen_at_every_width_beside_its_model(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    _show(LoadResult(outcome=LoadOutcome(list(_MODELS), [], 1)), Format.TABLE)
    printed = capsys.readouterr().out
    first = printed.split("\n\n")[0].splitlines()
    heading = " ".join(first[:2]).split()
    assert {"failed", "answer"} <= set(heading) and "refused" not in printed
    assert "predicted" not in printed  # nothing is
    row = next(line for line in first if line.startswith("resnet50_of_the_shop"))
    assert {"31", "18"} <= set(row.split())
    assert all(len(line) <= width for line in printed.splitlines())


def test_where_all_was_answered_no_column_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _show(LoadResult(outcome=LoadOutcome(list(_MODELS[1:]), [], 1)), Format.TABLE)
    assert "failed" not in capsys.readouterr().out
