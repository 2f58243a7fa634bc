from dataclasses import dataclass

from gpuprof.domain.runtime_variant import RuntimeVariant, comparable_rows, rank_variants

ORT = RuntimeVariant("onnxruntime", "fused", "tf32")
TORCH = RuntimeVariant("pytorch", "eager", "tf32")
UNKNOWN = RuntimeVariant()


@dataclass(frozen=True)
class Row:
    runtime: str | None
    execution: str | None
    precision: str | None
    name: str


def _row(variant: RuntimeVariant, name: str) -> Row:
    return Row(variant.runtime, variant.execution, variant.precision, name)


def test_what_serves_counts_before_what_was_measured_more_often_and_what_is_known_before_what_is_not() -> None:
    assert rank_variants([TORCH, TORCH, ORT, UNKNOWN, UNKNOWN, UNKNOWN]) == (ORT, TORCH, UNKNOWN)
    fast = RuntimeVariant("onnxruntime", "fused", "float32")
    assert rank_variants([fast, ORT, fast])[0] == fast
    assert rank_variants([]) == ()


def test_float32_and_tf32_are_not_comparable_but_models_of_other_types_are() -> None:
    assert not ORT.is_comparable(RuntimeVariant("onnxruntime", "fused", "float32"))
    assert ORT.is_comparable(RuntimeVariant("onnxruntime", "fused", "float16"))
    assert not ORT.is_comparable(TORCH) and UNKNOWN.is_comparable(RuntimeVariant())


def test_rows_of_one_fit_are_of_one_runtime() -> None:
    half = RuntimeVariant("onnxruntime", "fused", "float16")
    rows = [_row(TORCH, "a"), _row(ORT, "b"), _row(half, "c"), _row(ORT, "d"), _row(UNKNOWN, "e")]
    assert [row.name for row in comparable_rows(rows)] == ["b", "c", "d"]
    assert comparable_rows(rows[:0]) == []
