"""Looks at a machine's runtime, cores, control groups, memory and disk."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpuprof.errors import DISTRIBUTION, GpuprofError, install_hint
from gpuprof.machine.cgroup import CpuQuota, cgroup_version, cpu_quota_cores, memory_limit_bytes
from gpuprof.machine.cpu import local_cpu
from gpuprof.machine.finding import Finding, MachineView, Status
from gpuprof.runtime.cuda_provider import LIBRARIES_FIX
from gpuprof.runtime.gpu_probe import read_probe
from gpuprof.runtime.module_command import module_command
from gpuprof.runtime.providers import ORT_CUDA

_PROVIDER_FIX = "see GPUs above: without one ONNX Runtime runs models on the CPU and says nothing"
_ENOUGH_DISK_BYTES = 2**30
_EXTRA = re.compile(r"^(?P<name>[A-Za-z0-9._-]+).*;.*extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]")
_EXTRAS = {
    "cpu": "profiling and serving on the CPU",
    "gpu": "profiling and serving on GPUs",
    "serve": "gpuprof serve",
    "learn": "learned estimators",
    "export": "exporting models from PyTorch",
}


def runtime_findings(machine: MachineView) -> Iterator[Finding]:
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


def host_findings(machine: MachineView) -> Iterator[Finding]:
    """Yield findings for cores, clock policy, control groups and memory."""
    cpu = local_cpu(machine.root, machine.affinity())
    quota = cpu_quota_cores(machine.root)
    cap_note = "" if quota is None else f", capped at {quota:g} cores' time"
    yield Finding("cpu", "cores", Status.OK, f"{cpu.compute_units} of {cpu.sources['name']}{cap_note}")
    yield _examine_clock_policy(machine)
    yield _examine_quotas(machine)
    yield _examine_memory(machine, cpu.dram_bytes)


def storage_findings(database: Path) -> Iterator[Finding]:
    """Yield a finding for the place of the kernel database."""
    place = database.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        yield Finding(
            "storage", "database", Status.MISSING, f"{database}: {error.strerror}", "choose another with --db"
        )
        return
    detail = f"{database}{'' if database.exists() else ' (not there yet)'}, {free / 2**30:.1f} GiB free"
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield Finding("storage", "database", Status.LIMITED, f"{detail}, not writable", "choose another with --db")
    elif free < _ENOUGH_DISK_BYTES:
        yield Finding("storage", "database", Status.LIMITED, detail, "free some space or choose another with --db")
    else:
        yield Finding("storage", "database", Status.OK, detail)


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
    detail = f"{usable_bytes / 2**30:.1f} GiB{available}{', the limit of a control group' if is_limited else ''}"
    with suppress(ValueError):
        if match and int(match[1]) < 2**20:
            return Finding("cpu", "memory", Status.LIMITED, detail, "end other programs: under 1 GiB is available")
    return Finding("cpu", "memory", Status.OK, detail)
