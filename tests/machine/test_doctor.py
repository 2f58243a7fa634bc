"""What the doctor finds on machines that the tests play: bare, broken and complete ones."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.machine.doctor import Finding, MachineView, Status, examine_machine
from tests.command_line import CommandLine
from tests.machine.played_nvml import FakeNvmlError, PlayedNvml


def _bare(root: Path, **ways: Any) -> MachineView:
    blind: dict[str, Any] = {
        "root": root,
        "environment": {},
        "which": lambda name: None,
        "load": lambda name: None,
        "version": lambda name: None,
        "requirements": lambda name: (),
        "affinity": lambda: [0],
        "execute": lambda command: None,
        "is_root": False,
    }
    return MachineView(**{**blind, **ways})


def _write(root: Path, name: str, text: str = "") -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    return root / name


def _find_one(machine: MachineView, name: str) -> Finding:
    (finding,) = (f for f in examine_machine(machine, machine.root / "db") if f.name == name)
    return finding


def _nvml(**answers: Any) -> PlayedNvml:
    base = {
        "nvmlSystemGetDriverVersion": b"580.1",
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetName": b"NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=140 * 2**30, free=139 * 2**30),
        "nvmlDeviceGetComputeMode": 0,
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetMigMode": [0, 0],
    }
    return PlayedNvml(**{**base, **answers})


def test_on_a_bare_machine_everything_missing_says_what_to_do(tmp_path: Path) -> None:
    findings = examine_machine(_bare(tmp_path), tmp_path / "db")
    assert {"NVML", "MPS", "nsys", "ncu", "counters", "ONNX Runtime", "Ray", "cores", "CPU quotas", "memory"} <= {
        finding.name for finding in findings
    }
    assert all(finding.fix for finding in findings if finding.status is not Status.OK)


def test_a_gpu_is_described_with_driver_memory_and_modes(tmp_path: Path) -> None:
    finding = _find_one(_bare(tmp_path, load={"pynvml": _nvml()}.get), "GPU 0")
    assert finding.status is Status.OK
    assert finding.detail == (
        "NVIDIA H200 (h200), driver 580.1, 140.0 GiB, 139.0 free, compute mode default, MIG off, persistence on"
    )


@pytest.mark.parametrize(
    ("answers", "status", "fix"),
    [
        ({"nvmlDeviceGetComputeMode": 2}, Status.LIMITED, "nvidia-smi -i 0 -c DEFAULT"),
        ({"nvmlDeviceGetPersistenceMode": 0}, Status.OK, "nvidia-smi -i 0 -pm 1"),
        ({"nvmlDeviceGetName": b"Tesla V100-SXM2-16GB"}, Status.LIMITED, "build onnxruntime-gpu for this GPU"),
        ({"nvmlDeviceGetName": b"NVIDIA B200"}, Status.LIMITED, "build onnxruntime-gpu for this GPU"),
        ({"nvmlDeviceGetName": b"Tesla T4"}, Status.OK, ""),
        ({"nvmlDeviceGetMigMode": FakeNvmlError()}, Status.OK, ""),
        ({"nvmlDeviceGetMemoryInfo": FakeNvmlError()}, Status.OK, ""),
        ({"nvmlDeviceGetHandleByIndex": FakeNvmlError()}, Status.LIMITED, "see nvidia-smi"),
    ],
)
def test_a_gpu_that_cannot_be_used_says_why(tmp_path: Path, answers: Any, status: Status, fix: str) -> None:
    finding = _find_one(_bare(tmp_path, load={"pynvml": _nvml(**answers)}.get), "GPU 0")
    assert finding.status is status
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize("answers", [{"nvmlInit": OSError("libnvidia-ml.so")}, {"nvmlDeviceGetCount": 0}])
def test_without_a_driver_or_a_gpu_there_is_one_finding(tmp_path: Path, answers: Any) -> None:
    assert _find_one(_bare(tmp_path, load={"pynvml": _nvml(**answers)}.get), "GPUs").status is Status.MISSING


@pytest.mark.parametrize(("process", "state"), [("nvidia-cuda-mps", "daemon running"), ("bash", "daemon not running")])
def test_mps_says_whether_its_daemon_runs(tmp_path: Path, process: str, state: str) -> None:
    _write(tmp_path, "proc/17/comm", f"{process}\n")
    machine = _bare(tmp_path, which={"nvidia-cuda-mps-control": "/usr/bin/nvidia-cuda-mps-control"}.get)
    assert state in _find_one(machine, "MPS").detail


def _with_nsys(root: Path, printed: str | None) -> MachineView:
    binary = _write(root, "opt/tool/target-linux-x64/nsys")
    return _bare(root, which={"nsys": str(binary)}.get, execute=lambda command: printed)


def test_nsys_without_its_importer_is_limited(tmp_path: Path) -> None:
    machine = _with_nsys(tmp_path, "NVIDIA Nsight Systems version 2022.4.2.50-32196742v0\n")
    assert _find_one(machine, "nsys").status is Status.LIMITED
    _write(tmp_path, "opt/tool/host-linux-x64/QdstrmImporter")
    finding = _find_one(machine, "nsys")
    assert finding.status is Status.OK
    assert finding.detail.startswith("2022.4.2.50, ")


def test_ncu_is_found_beside_a_toolkit(tmp_path: Path) -> None:
    _write(tmp_path, "usr/local/cuda-13.0/bin/ncu")
    printed = "NVIDIA (R) Nsight Compute Command Line Profiler\nVersion 2025.3.1.0 (build 36398880) (public-release)\n"
    finding = _find_one(_bare(tmp_path, execute=lambda command: printed), "ncu")
    assert finding.status is Status.OK
    assert finding.detail.startswith("2025.3.1.0, ")


@pytest.mark.parametrize(
    ("parameters", "capabilities", "root", "status"),
    [
        ("RmProfilingAdminOnly: 0\n", "0", False, Status.OK),
        ("RmProfilingAdminOnly: 1\n", "0", False, Status.LIMITED),
        ("RmProfilingAdminOnly: 1\n", "0", True, Status.LIMITED),
        ("RmProfilingAdminOnly: 1\n", "0000000000200000", True, Status.OK),
        ("OtherThing: 1\n", "0", False, Status.OK),
        ("", "0", True, Status.MISSING),
    ],
)
def test_counters_need_rights(tmp_path: Path, parameters: str, capabilities: str, root: bool, status: Status) -> None:
    _write(tmp_path, "proc/driver/nvidia/params", parameters)
    _write(tmp_path, "proc/self/status", f"Name:\tx\nCapEff:\t{capabilities}\n")
    assert _find_one(_bare(tmp_path, is_root=root), "counters").status is status


def test_extras_name_the_packages_that_are_missing(tmp_path: Path) -> None:
    needs = ["numpy>=1.26", 'onnxruntime>=1.20; extra == "cpu"', "uvicorn>=0.32; extra == 'serve'"]
    needs.append("uvloop[x]>=0.2 ; extra == 'serve'")
    machine = _bare(tmp_path, requirements=lambda name: needs, version={"onnxruntime": "1", "uvicorn": "1"}.get)
    assert _find_one(machine, "extra cpu").status is Status.OK
    serve = _find_one(machine, "extra serve")
    assert serve.detail == "gpuprof serve: without uvloop"
    assert serve.fix == "pip install 'gpuprof-onnx[serve]'"


def _cuda_build(version: str = "1.31.1") -> SimpleNamespace:
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    return SimpleNamespace(__version__=version, get_available_providers=lambda: providers)


def test_the_version_of_onnx_runtime_is_the_modules_own(tmp_path: Path) -> None:
    ways = {"version": {"onnxruntime-gpu": "1.31.1"}.get, "load": {"onnxruntime": _cuda_build()}.get}
    same = _find_one(_bare(tmp_path, **ways), "ONNX Runtime")
    assert (same.status, same.detail) == (Status.OK, "1.31.1, providers CUDA, CPU")
    mismatched = _find_one(
        _bare(tmp_path, **ways | {"load": {"onnxruntime": _cuda_build("1.20.0")}.get}), "ONNX Runtime"
    )
    assert (
        mismatched.status is Status.LIMITED and "onnxruntime-gpu 1.31.1 is installed, and another" in mismatched.detail
    )


@pytest.mark.parametrize(
    ("attempt", "status", "words"),
    [
        ({"runs": True, "missing": [], "error": None}, Status.OK, "first GPU: fused+pinned; not so"),
        (
            {"runs": False, "missing": ["libcublas.so.13"], "error": None},
            Status.LIMITED,
            "libcublas.so.13 cannot be lo",
        ),
        ({"runs": False, "missing": [], "error": "no CUDA-capable device"}, Status.LIMITED, "no CUDA-capable device"),
        (None, Status.LIMITED, "ends the process that starts it"),
    ],
)
def test_the_gpu_provider_is_tried(tmp_path: Path, attempt: dict[str, Any] | None, status: Status, words: str) -> None:
    trial = {"probe": "options", "execution": "fused+pinned", "remarks": ["not so"]}

    def execute(command: list[str]) -> str | None:
        assert command[1:] == ["-m", "gpuprof.runtime.gpu_probe"]
        results = [] if attempt is None else [{"probe": "provider", **attempt}]
        results += [trial] if attempt and attempt["runs"] else []
        return "\n".join(map(json.dumps, results)) or None

    machine = _bare(tmp_path, load={"onnxruntime": _cuda_build()}.get, execute=execute)
    finding = _find_one(machine, "CUDA provider")
    assert finding.status is status and words in finding.detail
    assert bool(finding.fix) == (status is not Status.OK)


def test_two_builds_of_onnx_runtime_overwrite_each_other(tmp_path: Path) -> None:
    both = _bare(tmp_path, version={"onnxruntime": "1.20", "onnxruntime-gpu": "1.20"}.get)
    assert _find_one(both, "ONNX Runtime").fix == "pip uninstall onnxruntime-gpu onnxruntime, then install one of them"
    needs = ["onnxruntime-gpu>=1.20; extra == 'gpu'"]
    doubled = _bare(tmp_path, version={"onnxruntime": "1.20"}.get, requirements=lambda name: needs)
    assert _find_one(doubled, "extra gpu").fix == "pip uninstall onnxruntime, then pip install 'gpuprof-onnx[gpu]'"


@pytest.mark.parametrize(("governor", "status"), [("powersave", Status.LIMITED), ("performance", Status.OK)])
def test_a_saving_governor_is_a_limit(tmp_path: Path, governor: str, status: Status) -> None:
    _write(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", governor)
    assert _find_one(_bare(tmp_path), "clock policy").status is status


def test_a_database_inside_a_file_is_refused(tmp_path: Path) -> None:
    place = _write(tmp_path, "file") / "db"
    (finding,) = (f for f in examine_machine(_bare(tmp_path), place) if f.name == "database")
    assert finding.status is Status.LIMITED
    assert finding.fix == "choose another with --db"


def test_little_memory_left_is_a_limit(tmp_path: Path) -> None:
    _write(tmp_path, "proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 1024 kB\n")
    assert _find_one(_bare(tmp_path), "memory").status is Status.LIMITED


def test_the_command_prints_every_finding_and_succeeds(cli: CommandLine, tmp_path: Path) -> None:
    rows = cli.json("doctor --db", tmp_path / "db")
    assert {"topic", "name", "status", "detail", "fix"} == set(rows[0])
    assert "found → what to do" in cli("doctor --db", tmp_path / "db").out
    assert cli("doctor --db", tmp_path / "db", "--csv").out.startswith("topic,name,status,detail,fix\n")
    assert not (tmp_path / "db").exists()
