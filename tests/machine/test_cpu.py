"""The local CPU as a device, on file systems that the tests write."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.machine.cgroup import cgroup_version, cpu_quota_cores, memory_limit_bytes, usable_cores
from gpuprof.machine.cpu import flops_per_cycle, local_cpu, read_cpuinfo

XEON = "fma avx avx2 avx512f avx512_vnni"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _processor(number: int, core: int | None = None, fields: dict[str, str] | None = None) -> str:
    lines = {"processor": str(number), "vendor_id": "GenuineIntel", "cpu family": "6"}
    lines |= {"model name": "Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz", "cpu MHz": "1000.0", "flags": XEON}
    lines |= {"physical id": "0", "core id": str(number if core is None else core)}
    lines |= fields or {}
    return "".join(f"{key}\t: {value}\n" for key, value in lines.items())


def _machine(root: Path, processors: list[str], **files: str) -> Path:
    return _write(
        root, {"proc/cpuinfo": "\n".join(processors), "proc/meminfo": "MemTotal:       1024 kB\n", **files}
    )  # fmt: skip


def test_the_real_machine_is_described() -> None:
    cpu = local_cpu()
    assert cpu.kind == "cpu"
    assert cpu.name.startswith("cpu-")
    assert cpu.name.endswith(f"-{cpu.compute_units}c")
    assert all(rate > 0 for rate in cpu.flops_per_s.values())
    assert cpu.dram_bytes > 2**28
    assert "assumed" in cpu.sources["memory"]


def test_peaks_are_cores_times_clock_times_vector_width(tmp_path: Path) -> None:
    cpu = local_cpu(_machine(tmp_path, [_processor(n) for n in range(4)]), affinity={0, 1, 2, 3})
    assert cpu.name == "cpu-intel-xeon-gold-6148-4c"
    assert cpu.clock_mhz == 2400.0
    assert cpu.flops_per_s["float32"] == pytest.approx(4 * 2.4e9 * 64)
    assert cpu.flops_per_s["float64"] == pytest.approx(4 * 2.4e9 * 32)
    assert cpu.flops_per_s["int8"] == pytest.approx(4 * 2.4e9 * 256)
    assert cpu.dram_bytes == 2**20


def test_two_threads_of_a_core_share_its_vector_units(tmp_path: Path) -> None:
    cpu = local_cpu(_machine(tmp_path, [_processor(0, core=0), _processor(1, core=0)]), affinity={0, 1})
    assert cpu.compute_units == 2
    assert cpu.flops_per_s["float32"] == pytest.approx(2.4e9 * 64)


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "float32"),
    [
        ("GenuineIntel", "6", XEON, 64),
        ("AuthenticAMD", "25", XEON, 32),
        ("AuthenticAMD", "26", XEON, 64),
        ("AuthenticAMD", "23", "fma avx avx2", 32),
        ("GenuineIntel", "6", "avx", 16),
        ("GenuineIntel", "6", "sse2", 8),
        ("", "0", "asimd", 16),
    ],
)
def test_vector_units_decide_the_rate(tmp_path: Path, vendor: str, family: str, flags: str, float32: float) -> None:
    text = _processor(0, fields={"vendor_id": vendor, "cpu family": family, "flags": flags})
    rates, _ = flops_per_cycle(read_cpuinfo(_machine(tmp_path, [text]), {0}))
    assert rates["float32"] == float32


def test_an_unnamed_processor_without_proc_still_gives_a_device(tmp_path: Path) -> None:
    cpu = local_cpu(tmp_path, affinity={0, 1})
    assert cpu.compute_units == 2
    assert cpu.clock_mhz > 0
    assert cpu.l2_bytes > 0


def test_a_version_2_quota_and_memory_limit_shrink_the_device(tmp_path: Path) -> None:
    root = _machine(
        tmp_path,
        [_processor(n) for n in range(4)],
        **{
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/box/memory.max": "524288\n",
        },
    )
    assert (cgroup_version(root), cpu_quota_cores(root), memory_limit_bytes(root)) == (2, 1.5, 524288)
    cpu = local_cpu(root, affinity={0, 1, 2, 3})
    assert cpu.compute_units == 2
    assert cpu.flops_per_s["float32"] == pytest.approx(1.5 * 2.4e9 * 64)
    assert cpu.dram_bytes == 524288


def test_version_1_limits_are_read_where_the_container_sees_only_its_own_mount(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/cgroup.procs": "",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/cgroup.procs": "",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096\n",
        },
    )
    assert (cgroup_version(root), cpu_quota_cores(root), memory_limit_bytes(root)) == (1, 0.5, 4096)


def test_no_limit_is_none_in_both_versions(tmp_path: Path) -> None:
    version_1 = _write(
        tmp_path / "one",
        {
            "proc/self/cgroup": "1:cpu:/\n2:memory:/\n",
            "sys/fs/cgroup/cpu/cgroup.procs": "",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/cgroup.procs": "",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    two = _write(
        tmp_path / "two",
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/memory.max": "max\n",
        },
    )
    for root in (version_1, two, tmp_path / "nothing"):
        assert cpu_quota_cores(root) is None
        assert memory_limit_bytes(root) is None
    assert cgroup_version(tmp_path / "nothing") is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.2, 1), (1.0, 1), (1.5, 2), (16.0, 8)])
def test_a_quota_keeps_at_most_its_ceiling_of_cores_busy(quota: float | None, cores: int) -> None:
    assert usable_cores(8, quota) == cores
