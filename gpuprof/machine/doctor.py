"""What ``gpuprof doctor`` finds: GPUs, profilers, runtime, cores, control groups, memory and disk.

All access to the machine goes through a `MachineView`, so that a test can simulate any machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from gpuprof.domain.catalogue import device_of_driver
from gpuprof.domain.number_format import GIB
from gpuprof.errors import DISTRIBUTION, GpuprofError, install_hint
from gpuprof.machine.cgroup import CpuQuota, cgroup_version, cpu_quota_cores, memory_limit_bytes
from gpuprof.machine.cpu import local_cpu
from gpuprof.machine.gpu import ask_nvml, decode_nvml
from gpuprof.machine.mps import CONTROL, DEFAULT_PIPE
from gpuprof.runtime.gpu_probe import read_probe
from gpuprof.runtime.module_command import ANSWER_S, module_command
from gpuprof.runtime.providers import LIBRARIES_FIX, MPS_PIPE, ORT_CUDA, has_code


class Status(StrEnum):
    """Usability of a component."""

    OK = "ok"
    LIMITED = "limited"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the doctor's report."""

    topic: str  #: ``"gpu"``, ``"profilers"``, ``"runtime"``, ``"cpu"`` or ``"storage"``.
    name: str  #: Component examined.
    status: Status
    detail: str  #: Result of the examination.
    fix: str = ""  #: Remedy; empty when nothing is wrong.


def _load_module(name: str) -> Any:
    try:
        return import_module(name)
    # For example ONNX Runtime built for another NumPy: its extension may raise anything.
    except Exception:  # a broken library must not end the examination, whatever the error
        return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirements(distribution: str) -> Sequence[str]:
    with suppress(metadata.PackageNotFoundError):
        return metadata.requires(distribution) or ()
    return ()


def _execute_command(command: Sequence[str]) -> str | None:
    """Return the output of the command, or None when the command cannot be started, fails or hangs."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout if process.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class MachineView:
    """Access to a machine, replaceable in tests."""

    root: Path = Path("/")  #: Root of its file system.
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    which: Callable[[str], str | None] = shutil.which  #: Name of a program → its path, or None.
    load: Callable[[str], Any] = _load_module  #: Name of a module → the module; None: import failed.
    #: Name of a distribution → its version; None: not installed.
    version: Callable[[str], str | None] = _version
    #: Name of a distribution → its requirements, in the words of its metadata.
    requirements: Callable[[str], Sequence[str]] = _requirements
    affinity: Callable[[], Collection[int]] = lambda: os.sched_getaffinity(0)  #: → this process's processors.
    #: Command → its output; None: cannot be started, fails or hangs.
    execute: Callable[[Sequence[str]], str | None] = _execute_command
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)

    def read_text(self, path: str) -> str:
        """Return the text of the file at ``path`` below the root; empty when unreadable."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_VERSION = re.compile(r"(?:^|version:?\s+)(\d{4}\.\d+(?:\.\d+)*)", re.IGNORECASE | re.MULTILINE)
_PROVIDER_FIX = "see GPUs above: without one ONNX Runtime runs models on the CPU and says nothing"
_EXTRA = re.compile(r"^(?P<name>[A-Za-z0-9._-]+).*;.*extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]")
_EXTRAS = {
    "cpu": "profiling and serving on the CPU",
    "gpu": "profiling and serving on GPUs",
    "serve": "gpuprof serve",
    "learn": "learned estimators",
    "export": "exporting models from PyTorch",
}
_NO_GPU_FIX = "nothing to do for work on the CPU; for a GPU install NVIDIA's driver"
_COUNTERS_FIX = (
    "on the host: options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d and reboot; "
    "in a container: start it with --cap-add=SYS_ADMIN; until then only timing is profiled"
)


def examine_machine(machine: MachineView, database: Path) -> tuple[Finding, ...]:
    """Return the capabilities of this machine, and a remedy for each missing part.

    ``database``: directory of the kernel database, which need not exist.
    """
    return (
        *_find_gpus(machine),
        _examine_mps(machine),
        _examine_nsys(machine),
        _examine_ncu(machine),
        _examine_counters(machine),
        *_examine_runtime(machine),
        *_examine_host(machine),
        _examine_storage(database),
    )


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
            "memory unknown" if memory is None else f"{memory.total / GIB:.1f} GiB, {memory.free / GIB:.1f} free",
            f"compute mode {_COMPUTE_MODES.get(mode, 'unknown')}",
            f"MIG {'not supported' if mig is None else 'on' if mig[0] else 'off'}",
            f"persistence {'unknown' if persistent is None else 'on' if persistent else 'off'}",
        )
    )
    # Prohibited: no process may create a CUDA context, regardless of other settings.
    if mode == 2:
        fix = f"nvidia-smi -i {index} -c DEFAULT"
        return Finding("gpu", f"GPU {index}", Status.LIMITED, detail, fix)
    if catalogued is not None and catalogued.compute_capability and not has_code(catalogued.compute_capability):
        detail += f", compute capability {catalogued.compute_capability}: ONNX Runtime has no code for it"
        return Finding("gpu", f"GPU {index}", Status.LIMITED, detail, "build onnxruntime-gpu for this GPU")
    if persistent == 0:
        fix = f"nvidia-smi -i {index} -pm 1, so that the driver stays loaded between runs"
        return Finding("gpu", f"GPU {index}", Status.OK, detail, fix)
    return Finding("gpu", f"GPU {index}", Status.OK, detail)


def _examine_mps(machine: MachineView) -> Finding:
    binary = machine.which(CONTROL)
    if binary is None:
        fix = "comes with NVIDIA's driver; without it GPU shares are not enforced, MIG instances still are"
        return Finding("gpu", "MPS", Status.MISSING, f"{CONTROL} is not on the PATH", fix)
    # The kernel truncates names to 15 characters: the daemon and its server both appear as "nvidia-cuda-mps".
    names = (machine.read_text(str(path.relative_to(machine.root))) for path in machine.root.glob("proc/[0-9]*/comm"))
    is_running = any(name.startswith("nvidia-cuda-mps") for name in names)
    pipe = machine.environment.get(MPS_PIPE, DEFAULT_PIPE)
    state = f"daemon running, pipe {pipe}" if is_running else "daemon not running; gpuprof starts its own when needed"
    return Finding("gpu", "MPS", Status.OK, f"{binary}, {state}")


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
    places = [Path(binary).resolve().parent.parent.glob("host-linux-*/QdstrmImporter")]
    for directory in ("usr/lib/nsight-systems", "opt/nvidia/nsight-systems*/*"):
        places.append(root.glob(f"{directory}/host-linux-*/QdstrmImporter"))
    return next((path for place in places for path in sorted(place)), None)


def _examine_ncu(machine: MachineView) -> Finding:
    patterns = ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")
    paths = (str(path) for pattern in patterns for path in sorted(machine.root.glob(pattern), reverse=True))
    binary = machine.which("ncu") or next(paths, None)
    if binary is None:
        fix = "install Nsight Compute (CUDA toolkit, or nsight-compute of NVIDIA's repository) for counters of kernels"
        return Finding("profilers", "ncu", Status.MISSING, "not on the PATH", fix)
    version = _ask_version(machine, binary)
    if version is None:
        return Finding("profilers", "ncu", Status.LIMITED, f"{binary} does not run", "reinstall Nsight Compute")
    return Finding("profilers", "ncu", Status.OK, f"{version}, {binary}")


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
    capabilities = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", machine.read_text("proc/self/status"), re.MULTILINE)
    # CAP_SYS_ADMIN is bit 21 (linux/capability.h). Root in a container does not have this capability by default.
    if machine.is_root and capabilities is not None and int(capabilities[1], 16) >> 21 & 1:
        return Finding("profilers", "counters", Status.OK, "for administrators only, which this user is")
    return Finding("profilers", "counters", Status.LIMITED, "for administrators only", _COUNTERS_FIX)


def _examine_runtime(machine: MachineView) -> Iterator[Finding]:
    """Yield findings for Python, ONNX Runtime, gpuprof's extras and Ray."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    yield Finding(
        "runtime", "Python", Status.OK, f"{version}, gpuprof {machine.version(DISTRIBUTION) or 'not installed'}"
    )
    yield _examine_onnxruntime(machine)
    yield from _examine_cuda_provider(machine)
    yield from _examine_extras(machine)
    ray = machine.version("ray")
    if ray is None:
        yield Finding(
            "runtime", "Ray", Status.MISSING, "not installed", f"{install_hint('ray')}, for several machines only"
        )
    else:
        yield Finding("runtime", "Ray", Status.OK, ray)


def _examine_host(machine: MachineView) -> Iterator[Finding]:
    """Yield findings for cores, clock policy, control groups and memory."""
    cpu = local_cpu(machine.root, machine.affinity())
    quota = cpu_quota_cores(machine.root)
    cap_note = "" if quota is None else f", capped at {quota:g} cores' time"
    yield Finding("cpu", "cores", Status.OK, f"{cpu.compute_units} of {cpu.sources['name']}{cap_note}")
    yield _examine_clock_policy(machine)
    yield _examine_quotas(machine)
    yield _examine_memory(machine, cpu.dram_bytes)


def _examine_storage(database: Path) -> Finding:
    """Return a finding for the place of the kernel database."""
    place = database.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    fix = "choose another with --db"
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding("storage", "database", Status.MISSING, f"{database}: {error.strerror}", fix)
    detail = f"{database}{'' if database.exists() else ' (not there yet)'}, {free / GIB:.1f} GiB free"
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding("storage", "database", Status.LIMITED, f"{detail}, not writable", fix)
    if free < GIB:
        return Finding("storage", "database", Status.LIMITED, detail, f"free some space or {fix}")
    return Finding("storage", "database", Status.OK, detail)


def _examine_onnxruntime(machine: MachineView) -> Finding:
    installed = [name for name in ("onnxruntime-gpu", "onnxruntime") if machine.version(name)]
    if not installed:
        fix = f"{install_hint('cpu')}, on a machine with GPUs {install_hint('gpu')}"
        return Finding("runtime", "ONNX Runtime", Status.MISSING, "not installed", fix)
    if len(installed) > 1:
        fix = f"pip uninstall {' '.join(installed)}, then install one of them"
        detail = f"{' and '.join(installed)} are both installed and overwrite each other"
        return Finding("runtime", "ONNX Runtime", Status.LIMITED, detail, fix)
    distribution = installed[0]
    runtime = machine.load("onnxruntime")
    if runtime is None:
        fix = f"pip install --force-reinstall {distribution}"
        return Finding("runtime", "ONNX Runtime", Status.LIMITED, f"{distribution} cannot be imported", fix)
    providers = [name.removesuffix("ExecutionProvider") for name in runtime.get_available_providers()]
    detail = f"{runtime.__version__}, providers {', '.join(providers)}"
    if runtime.__version__ != machine.version(distribution):
        fix = f"pip install --force-reinstall {distribution}"
        detail += f"; {distribution} {machine.version(distribution)} is installed, and another is imported"
        return Finding("runtime", "ONNX Runtime", Status.LIMITED, detail, fix)
    return Finding("runtime", "ONNX Runtime", Status.OK, detail)


def _examine_cuda_provider(machine: MachineView) -> Iterator[Finding]:
    """Yield whether the NVIDIA provider starts, if ONNX Runtime was built with this provider."""
    runtime = machine.load("onnxruntime")
    if runtime is None or ORT_CUDA not in runtime.get_available_providers():
        return
    probe = read_probe(machine.execute(module_command("gpuprof.runtime.gpu_probe")) or "")
    if probe.reason is None:
        detail = "; ".join([f"runs a small network on the first GPU: {probe.execution}", *probe.remarks])
        yield Finding("runtime", "CUDA provider", Status.OK, detail)
        return
    fix = LIBRARIES_FIX if "cannot be loaded" in probe.reason else _PROVIDER_FIX
    yield Finding("runtime", "CUDA provider", Status.LIMITED, probe.reason, fix)


def _examine_extras(machine: MachineView) -> Iterator[Finding]:
    requirements = machine.requirements(DISTRIBUTION)
    if not requirements:
        fix = "pip install -e '.[cpu,serve]' in the checkout"
        yield Finding("runtime", "extras", Status.LIMITED, "cannot be told: gpuprof is not installed", fix)
    packages_by_extra: dict[str, list[str]] = {extra: [] for extra in _EXTRAS}
    for requirement in requirements:
        if (match := _EXTRA.match(requirement)) and match["extra"] in packages_by_extra:
            packages_by_extra[match["extra"]].append(match["name"])
    for extra, packages in packages_by_extra.items():
        missing = [name for name in packages if machine.version(name) is None]
        purpose = _EXTRAS[extra]
        if missing:
            # The two builds of ONNX Runtime share their files: the first must be uninstalled before the other is
            # installed.
            swap = "onnxruntime-gpu" in missing and machine.version("onnxruntime") is not None
            first = "pip uninstall onnxruntime, then " if swap else ""
            detail = f"{purpose}: without {', '.join(missing)}"
            yield Finding("runtime", f"extra {extra}", Status.MISSING, detail, f"{first}{install_hint(extra)}")
        elif packages:
            yield Finding("runtime", f"extra {extra}", Status.OK, f"{purpose}: complete")


def _examine_clock_policy(machine: MachineView) -> Finding:
    governor = machine.read_text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    if governor in {"powersave", "ondemand", "conservative", "schedutil"}:
        fix = "cpupower frequency-set -g performance, for steadier measurements"
        return Finding("cpu", "clock policy", Status.LIMITED, governor, fix)
    return Finding("cpu", "clock policy", Status.OK, governor or "not in this system's hands")


def _examine_quotas(machine: MachineView) -> Finding:
    version = cgroup_version(machine.root)
    fix = "shares that are whole cores still work; for fractions run as root, or in a container with writable cgroups"
    if version is None:
        return Finding("cpu", "CPU quotas", Status.MISSING, "no control groups for CPU time are mounted", fix)
    try:
        # Tested by trying: write access to control groups depends on delegation, mounts and the container.
        with CpuQuota.enter(f"doctor-{os.getpid()}", float(len(machine.affinity()))):
            pass
    except (GpuprofError, OSError) as error:
        reason = error.message if isinstance(error, GpuprofError) else error.strerror
        return Finding("cpu", "CPU quotas", Status.LIMITED, f"cgroup v{version}, {reason}", fix)
    return Finding("cpu", "CPU quotas", Status.OK, f"cgroup v{version}, a quota could be set and was removed again")


def _examine_memory(machine: MachineView, usable_bytes: int) -> Finding:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", machine.read_text("proc/meminfo"), re.MULTILINE)
    available = f", {int(match[1]) / 2**20:.1f} GiB available" if match else ""
    is_limited = memory_limit_bytes(machine.root) == usable_bytes
    detail = f"{usable_bytes / GIB:.1f} GiB{available}{', the limit of a control group' if is_limited else ''}"
    with suppress(ValueError):
        if match and int(match[1]) < 2**20:
            return Finding("cpu", "memory", Status.LIMITED, detail, "end other programs: under 1 GiB is available")
    return Finding("cpu", "memory", Status.OK, detail)
