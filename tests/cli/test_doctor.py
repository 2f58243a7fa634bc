"""``gpuprof doctor``: its first line says what the machine can do."""

from __future__ import annotations

import pytest

from gpuprof.cli.main import main
from gpuprof.machine.doctor import Finding, Status
from gpuprof.pipeline.doctor import DoctorResult


def finding(name: str, status: Status = Status.OK) -> Finding:
    return Finding("topic", name, status, "detail")


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        (
            ["ONNX Runtime", "extra cpu", "extra serve"],
            "profile, estimate, place and serve on the CPU; no NVIDIA driver.",
        ),
        (
            ["GPU 0", "GPU 1", "extra gpu", "extra serve", "ONNX Runtime"],
            "profile, estimate, place and serve on 2 GPUs and the CPU.",
        ),
        (
            ["GPU 0", "ONNX Runtime"],
            "profile, estimate and place on the CPU; no server: the extra serve is missing; GPUs need the extra gpu.",
        ),
        (
            ["extra serve"],
            "estimate, place and serve; no ONNX Runtime, which profile and estimates of GPUs need; no NVIDIA driver.",
        ),
    ],
)
def test_the_verdict_names_what_works_and_where(findings: list[str], verdict: str) -> None:
    absent = finding("Ray", Status.MISSING)
    assert DoctorResult(findings=(*map(finding, findings), absent)).verdict() == verdict


def test_doctor_begins_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("This machine can ")
