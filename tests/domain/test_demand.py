from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.demand import Demand, Slo, read_demands
from gpuprof.errors import InputError


def _read_text(tmp_path: Path, text: str) -> tuple[Demand, ...]:
    path = tmp_path / "slo.csv"
    path.write_text(text, encoding="utf-8")
    return read_demands(path)


def test_columns_may_stand_in_any_order_and_optional_ones_may_be_empty(tmp_path: Path) -> None:
    text = "slo_ms,model,rate_rps,percentile,max_replicas\n40,resnet50,400,,\n\n# night\n25.5, bert ,1e1,95,3\n"
    assert _read_text(tmp_path, text) == (
        Demand("resnet50", 400.0, Slo(40.0, 99.0)),
        Demand("bert", 10.0, Slo(25.5, 95.0), max_replicas=3),
    )


def test_headings_may_be_written_large(tmp_path: Path) -> None:
    assert _read_text(tmp_path, "Model, Rate_RPS, SLO_ms\na,1,2\n") == (Demand("a", 1.0, Slo(2.0, 99.0)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,rate_rps\na,1\n", r"slo.csv:1: the header lacks slo_ms"),
        ("model;rate_rps;slo_ms\na;1;1\n", r"slo.csv:1: fields are separated by ';', not by commas"),
        ("model,rate_rps,slo_ms\na,1,20ms\n", r"slo_ms must be a number but got '20ms' \(no units"),
        (
            "model,rate_rps,slo_ms,percentile\na,1,1,0.99\n",
            r"slo.csv:2: percentile of the SLO of 'a' must be a number from 1 to 99.999 but got 0.99",
        ),
        ("model,rate_rps,slo_ms,color\n", r"slo.csv:1: unknown column 'color'"),
        ("model,rate_rps,slo_ms,model\n", r"stands twice"),
        (
            "model,rate_rps,slo_ms\na,nan,1\n",
            r"slo.csv:2: rate_rps of 'a' must be a number from 1e-09 to .* but got nan",
        ),
        (
            "model,rate_rps,slo_ms\na,1,inf\n",
            r"slo.csv:2: latency_ms of the SLO of 'a' must be a number above 0 and finite but got inf",
        ),
        ("model,rate_rps,slo_ms\na,many,1\n", r"slo.csv:2: rate_rps must be a number but got 'many'"),
        ("model,rate_rps,slo_ms\nb,1,1\na,1\n", r"slo.csv:3: 2 fields where the header has 3"),
        ("model,rate_rps,slo_ms\n,1,1\n", r"slo.csv:2: model is empty"),
        ("model,rate_rps,slo_ms\na,1,1\na,2,2\n", r"slo.csv:3: 'a' was already asked for in line 2"),
        ("model,rate_rps,slo_ms,max_replicas\na,1,1,1.5\n", r"max_replicas must be a whole number but got 1.5"),
        (
            "model,rate_rps,slo_ms,min_goodput_rps\na,1,1,2\n",
            r"min_goodput_rps of 'a' must be a number from 0 to 1 but got 2",
        ),
        ("model,rate_rps,slo_ms\n", r"holds no demands"),
        ("", r"holds no demands"),
        ('model,rate_rps,slo_ms\n"a,1,1\n', r"not CSV"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _read_text(tmp_path, text)


def test_a_missing_or_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none.csv: No such file"):
        read_demands(tmp_path / "none.csv")
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07\xff\xfe")
    with pytest.raises(InputError, match="not a text file"):
        read_demands(tmp_path / "model.onnx")


@given(st.text(max_size=200))
def test_no_text_makes_it_crash(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "slo.csv"
    path.write_text("model,rate_rps,slo_ms\n" + text, encoding="utf-8", errors="replace")
    try:
        demands = read_demands(path)
    except InputError:
        return
    assert all(demand.rate_rps > 0 and demand.slo.latency_ms > 0 for demand in demands)
