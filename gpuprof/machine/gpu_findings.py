"""Looks at a machine's GPUs, at MPS, and at NVIDIA's profilers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpuprof.domain.catalogue import device_of_driver
from gpuprof.errors import install_hint
from gpuprof.machine.finding import Finding, MachineView, Status
from gpuprof.machine.nvml import ask_nvml, decode_nvml
from gpuprof.runtime.cuda_provider import has_wheel_code

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_VERSION = re.compile(r"(?:^|version:?\s+)(\d{4}\.\d+(?:\.\d+)*)", re.IGNORECASE | re.MULTILINE)
_NO_GPU_FIX = "nothing to do for work on the CPU; for a GPU install NVIDIA's driver"
_COUNTERS_FIX = (
    "on the host: options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d and reboot; "
    "in a container: start it with --cap-add=SYS_ADMIN; until then only timing is profiled"
)


def gpu_findings(machine: MachineView) -> Iterator[Finding]:
    """Yield a finding for each GPU, or the reason for a missing GPU, and for MPS."""
    yield from _find_gpus(machine)
    yield _examine_mps(machine)


def profiler_findings(machine: MachineView) -> Iterator[Finding]:
    """Yield findings for nsys, ncu and the permission to read performance counters."""
    yield _examine_nsys(machine)
    yield _examine_ncu(machine)
    yield _examine_counters(machine)


def _find_gpus(machine: MachineView) -> Iterator[Finding]:
    nvml = machine.load("pynvml")
    if nvml is None:
        yield Finding("gpu", "NVML", Status.MISSING, "nvidia-ml-py is not installed", install_hint("gpu"))
        return
    try:
        nvml.nvmlInit()
        count = int(nvml.nvmlDeviceGetCount())
    except Exception as error:  # NVML's errors, and a driver that does not fit its library
        yield Finding("gpu", "GPUs", Status.MISSING, f"none: {error}", _NO_GPU_FIX)
        return
    driver = decode_nvml(ask_nvml(nvml, "nvmlSystemGetDriverVersion") or "unknown")
    if count == 0:
        yield Finding("gpu", "GPUs", Status.MISSING, f"none; driver {driver}", _NO_GPU_FIX)
    for index in range(count):
        handle = ask_nvml(nvml, "nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            yield Finding("gpu", f"GPU {index}", Status.LIMITED, "the driver does not hand it out", "see nvidia-smi")
        else:
            yield _examine_gpu(nvml, handle, index, driver)
    ask_nvml(nvml, "nvmlShutdown")


def _examine_gpu(nvml: Any, handle: Any, index: int, driver: str) -> Finding:
    mode = ask_nvml(nvml, "nvmlDeviceGetComputeMode", handle)
    persistent = ask_nvml(nvml, "nvmlDeviceGetPersistenceMode", handle)
    mig = ask_nvml(nvml, "nvmlDeviceGetMigMode", handle)
    memory = ask_nvml(nvml, "nvmlDeviceGetMemoryInfo", handle)
    name = decode_nvml(ask_nvml(nvml, "nvmlDeviceGetName", handle) or "unknown")
    catalogued = device_of_driver(name)
    detail = ", ".join(
        (
            name if catalogued is None else f"{name} ({catalogued.name})",
            f"driver {driver}",
            "memory unknown" if memory is None else f"{memory.total / 2**30:.1f} GiB, {memory.free / 2**30:.1f} free",
            f"compute mode {_COMPUTE_MODES.get(mode, 'unknown')}",
            f"MIG {'not supported' if mig is None else 'on' if mig[0] else 'off'}",
            f"persistence {'unknown' if persistent is None else 'on' if persistent else 'off'}",
        )
    )
    # Prohibited: no process may create a CUDA context, regardless of other settings.
    if mode == 2:
        fix = f"nvidia-smi -i {index} -c DEFAULT"
        return Finding("gpu", f"GPU {index}", Status.LIMITED, detail, fix)
    if catalogued is not None and catalogued.compute_capability and not has_wheel_code(catalogued.compute_capability):
        detail += f", compute capability {catalogued.compute_capability}: ONNX Runtime's wheels have no code for it"
        return Finding("gpu", f"GPU {index}", Status.LIMITED, detail, "build onnxruntime-gpu for this GPU")
    if persistent == 0:
        fix = f"nvidia-smi -i {index} -pm 1, so that the driver stays loaded between runs"
        return Finding("gpu", f"GPU {index}", Status.OK, detail, fix)
    return Finding("gpu", f"GPU {index}", Status.OK, detail)


def _examine_mps(machine: MachineView) -> Finding:
    binary = machine.which("nvidia-cuda-mps-control")
    if binary is None:
        fix = "comes with NVIDIA's driver; without it GPU shares are not enforced, MIG instances still are"
        return Finding("gpu", "MPS", Status.MISSING, "nvidia-cuda-mps-control is not on the PATH", fix)
    # The kernel truncates names to 15 characters: the daemon and its server both appear as "nvidia-cuda-mps".
    is_running = any(name.startswith("nvidia-cuda-mps") for name in _list_process_names(machine.root))
    pipe = machine.environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    state = f"daemon running, pipe {pipe}" if is_running else "daemon not running; gpuprof starts its own when needed"
    return Finding("gpu", "MPS", Status.OK, f"{binary}, {state}")


def _list_process_names(root: Path) -> Iterator[str]:
    for path in (root / "proc").glob("[0-9]*/comm"):
        try:
            yield path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue  # ended meanwhile


def _examine_nsys(machine: MachineView) -> Finding:
    binary = machine.which("nsys")
    if binary is None:
        fix = "apt-get install nsight-systems (Debian: non-free) or nsight-systems-cli (NVIDIA's repository)"
        return Finding("profilers", "nsys", Status.MISSING, "not on the PATH", fix)
    version = _ask_version(machine, binary)
    if version is None:
        return Finding("profilers", "nsys", Status.LIMITED, f"{binary} does not run", "reinstall Nsight Systems")
    importer = _find_importer(machine.root, binary)
    if importer is None:
        fix = "install the package with the host part (nsight-systems-host); recorded runs cannot be read without it"
        return Finding("profilers", "nsys", Status.LIMITED, f"{version}, {binary}, without QdstrmImporter", fix)
    return Finding("profilers", "nsys", Status.OK, f"{version}, {binary}, importer {importer}")


def _find_importer(root: Path, binary: str) -> Path | None:
    """Return the program that converts recordings into reports: beside nsys, or in the packages' directories."""
    try:
        base = Path(binary).resolve().parent.parent
    except OSError:
        base = Path(binary).parent.parent
    places = [base.glob("host-linux-*/QdstrmImporter")]
    for pattern in ("usr/lib/nsight-systems/host-linux-*", "opt/nvidia/nsight-systems*/*/host-linux-*"):
        places.append(root.glob(f"{pattern}/QdstrmImporter"))
    return next((path for place in places for path in sorted(place)), None)


def _examine_ncu(machine: MachineView) -> Finding:
    binary = machine.which("ncu") or _find_first(
        machine.root, "usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu"
    )
    if binary is None:
        fix = "install Nsight Compute (CUDA toolkit, or nsight-compute of NVIDIA's repository) for counters of kernels"
        return Finding("profilers", "ncu", Status.MISSING, "not on the PATH", fix)
    version = _ask_version(machine, binary)
    if version is None:
        return Finding("profilers", "ncu", Status.LIMITED, f"{binary} does not run", "reinstall Nsight Compute")
    return Finding("profilers", "ncu", Status.OK, f"{version}, {binary}")


def _find_first(root: Path, *patterns: str) -> str | None:
    return next((str(path) for pattern in patterns for path in sorted(root.glob(pattern), reverse=True)), None)


def _ask_version(machine: MachineView, binary: str) -> str | None:
    output = machine.execute([binary, "--version"])
    if output is None:
        return None
    match = _VERSION.search(output)
    return match[1] if match else "unknown version"


def _examine_counters(machine: MachineView) -> Finding:
    parameters = machine.read_text("proc/driver/nvidia/params")
    if not parameters:
        return Finding("profilers", "counters", Status.MISSING, "no NVIDIA driver is loaded", _NO_GPU_FIX)
    match = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", parameters, re.MULTILINE)
    if match is None:
        return Finding("profilers", "counters", Status.OK, "the driver does not restrict them")
    if match[1] == "0":
        return Finding("profilers", "counters", Status.OK, "open to all users")
    if machine.is_root and _has_sys_admin(machine):
        return Finding("profilers", "counters", Status.OK, "for administrators only, which this user is")
    return Finding("profilers", "counters", Status.LIMITED, "for administrators only", _COUNTERS_FIX)


def _has_sys_admin(machine: MachineView) -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", machine.read_text("proc/self/status"), re.MULTILINE)
    # CAP_SYS_ADMIN is bit 21 (linux/capability.h). Root in a container does not have this capability by default.
    return match is not None and bool(int(match[1], 16) >> 21 & 1)
