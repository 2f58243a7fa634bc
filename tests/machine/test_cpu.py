"""The local CPU as a device, on file systems that the tests write."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine.cgroup import (
    CpuQuota,
    cgroup_version,
    confine_to_share,
    cpu_quota_cores,
    memory_limit_bytes,
    own_cores,
    quota_parent,
    usable_cores,
)
from gpuprof.machine.cores import MachineLoad
from gpuprof.machine.cpu import flops_per_cycle, local_cpu, read_cpuinfo
from gpuprof.machine.machine_code import code_directory, compile_function, is_machine_code_cached
from gpuprof.rules.cpu_slices import CpuSlice, plan_slices

XEON = "fma avx avx2 avx512f avx512_vnni"
GROUPS = "sys/fs/cgroup"


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


V1 = {
    "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n",
    f"{GROUPS}/cpu,cpuacct/cgroup.procs": "",
    f"{GROUPS}/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
    f"{GROUPS}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    f"{GROUPS}/memory/cgroup.procs": "",
    f"{GROUPS}/memory/memory.limit_in_bytes": "4096\n",
}
NO_LIMIT_V1 = {
    f"{GROUPS}/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    f"{GROUPS}/memory/memory.limit_in_bytes": "9223372036854771712\n",
}
NO_LIMIT_V2 = {
    "proc/self/cgroup": "0::/\n",
    f"{GROUPS}/cgroup.controllers": "cpu memory\n",
    f"{GROUPS}/cpu.max": "max 100000\n",
    f"{GROUPS}/memory.max": "max\n",
}


@pytest.mark.parametrize(
    ("files", "limits"),
    [(V1, (1, 0.5, 4096)), (V1 | NO_LIMIT_V1, (1, None, None)), (NO_LIMIT_V2, (2, None, None)), ({}, (None,) * 3)],
    ids=["a container that sees only its own mount", "none in version 1", "none in version 2", "no control groups"],
)
def test_limits_are_read_in_both_versions(tmp_path: Path, files: dict[str, str], limits: tuple[object, ...]) -> None:
    root = _write(tmp_path, files)
    assert (cgroup_version(root), cpu_quota_cores(root), memory_limit_bytes(root)) == limits


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.2, 1), (1.0, 1), (1.5, 2), (16.0, 8)])
def test_a_quota_keeps_at_most_its_ceiling_of_cores_busy(quota: float | None, cores: int) -> None:
    assert usable_cores(8, quota) == cores


CORES = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="takes two cores")


def run(program: str) -> str:
    modules = "gpuprof.machine.cores", "gpuprof.machine.cgroup"
    head = "import os, subprocess, sys, threading\n" + "".join(f"from {module} import *\n" for module in modules)
    completed = subprocess.run([sys.executable, "-c", head + program], capture_output=True, text=True, check=True)
    return completed.stdout.strip()


@needs_two
def test_every_thread_stays_off_and_the_cores_that_are_planned_with_stay_the_same() -> None:
    program = f"""
done = threading.Event()
threading.Thread(target=done.wait, daemon=True).start()
before = own_cores()
print(avoid_cores([{CORES[0]}]), own_cores() == before)
print({{str(sorted(os.sched_getaffinity(int(task)))) for task in os.listdir('/proc/self/task')}} == {{'{CORES[1:]}'}})
print(avoid_cores([]), sorted(os.sched_getaffinity(0)) == {CORES})
"""
    assert run(program).splitlines() == ["True True", "True", "False True"]


def test_where_every_core_computes_nothing_changes() -> None:
    assert run(f"print(avoid_cores({CORES}), sorted(os.sched_getaffinity(0)) == {CORES})") == "False True"


@needs_two
def test_processes_that_are_started_inside_stay_off_too() -> None:
    program = f"""
with avoiding_cores([{CORES[0]}]):
    told = 'import os; print(sorted(os.sched_getaffinity(0)))'
    print(subprocess.check_output([sys.executable, '-c', told], text=True))
print(sorted(os.sched_getaffinity(0)) == {CORES})
"""
    assert run(program).split("\n") == [str(CORES[1:]), "", "True"]


def test_who_answers_quickly_stays_an_ordinary_process_of_the_same_priority() -> None:
    program = "shorten_wakeup_latency(); print(os.sched_getscheduler(0), os.getpriority(0, 0))"
    assert run(program) == f"{os.SCHED_OTHER} {os.getpriority(os.PRIO_PROCESS, 0)}"


def _stat(path: Path, *cores: str, whole: str = "") -> Path:
    lines = [*([f"cpu  {whole}"] if whole else []), *(f"cpu{number} {ticks}" for number, ticks in enumerate(cores))]
    path.write_text("\n".join([*lines, "", "intr 12\n"]))
    return path


@pytest.mark.parametrize("text", ["", "cpu  1 2 3\n", "cpu0 nonsense\nand so on\n", "cpu  1 2 3 4 5 6 7 x\n", None])
def test_where_the_kernel_does_not_count_nothing_is_known(tmp_path: Path, text: str | None) -> None:
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    load = MachineLoad([0], stat)
    assert load.describe_disturbance(0.0, 0.0) is None and load.stolen_part() is None


def test_other_programs_disturb_a_measurement_beyond_its_own_use(tmp_path: Path) -> None:
    stat = _stat(tmp_path / "stat", "0 0 0 0 0 0 0 0 0 0", "0 0 0 0 0 0 0 0 0 0")
    load = MachineLoad([0, 1], stat)
    # What is neither idle nor waiting for a disk nor stolen is busy.
    _stat(stat, "100 0 0 0 0 0 0 0 0 0", "40 20 0 20 20 0 0 0 0 0")
    assert load.describe_disturbance(1.6, 0.04) is None
    assert load.describe_disturbance(None, 0.04) is None  # of a GPU
    message = load.describe_disturbance(1.0, 0.04)
    assert message is not None and message.startswith("other programs kept 0.6 of the 2 cores busy")


def test_stolen_time_is_a_part_of_all_ticks_and_disturbs_too(tmp_path: Path) -> None:
    stat = _stat(tmp_path / "stat", whole="100 0 0 800 0 0 0 100 7 7")
    load = MachineLoad([0], stat)
    _stat(stat, whole="150 0 0 970 0 0 0 180 9 9")
    assert load.stolen_part() == pytest.approx(80 / 300)
    assert "27% of this machine's time" in str(load.describe_disturbance(None, 0.04))
    assert load.describe_disturbance(None, 0.3) is None


def _v2(group: str, controllers: str, handed_on: str) -> dict[str, str]:
    return {f"{group}/cgroup.controllers": controllers, f"{group}/cgroup.subtree_control": handed_on}


@pytest.mark.parametrize(
    ("files", "own", "group", "version"),
    [
        (dict.fromkeys((f"{GROUPS}/cpu/cgroup.procs", f"{GROUPS}/cpu/cpu.cfs_quota_us"), ""),
         "3:cpuset:/\n1:cpu:/\n0::/\n", "cpu", 1),
        (_v2(GROUPS, "cpu memory", "") | _v2(f"{GROUPS}/app", "cpu memory", "cpu"), "0::/app\n", "app", 2),
        (_v2(GROUPS, "cpu memory", "cpu") | _v2(f"{GROUPS}/app", "memory", ""), "0::/app\n", "", 2),
    ],
    ids=["where version 1 is mounted", "the own group that hands the controller on", "the parent that does"],
)  # fmt: skip
def test_quotas_are_set_in_the_nearest_group_that_allows_them(
    tmp_path: Path, files: dict[str, str], own: str, group: str, version: int
) -> None:
    root = _write(tmp_path, {**files, "proc/self/cgroup": own})
    assert quota_parent(root) == (tmp_path / GROUPS / group, version)


@pytest.mark.parametrize(("cores", "limit"), [(0.5, "5000 10000"), (1.5, "15000 10000"), (0.05, "1000 20000")])
def test_quotas_are_written_as_the_kernel_wants_them(tmp_path: Path, cores: float, limit: str) -> None:
    CpuQuota(tmp_path, 2)._limit(cores)
    assert (tmp_path / "cpu.max").read_text() == limit
    CpuQuota(tmp_path, 1)._limit(cores)
    assert (tmp_path / "cpu.cfs_quota_us").read_text() == limit.split()[0]
    assert (tmp_path / "cpu.cfs_period_us").read_text() == limit.split()[1]


def _quota_reason() -> str:
    try:
        quota_parent()
    except UnavailableError as error:
        return str(error)
    return ""


def test_whole_cores_are_nobody_elses() -> None:
    assert plan_slices([50, 50], [0, 1]) == (CpuSlice((0,)), CpuSlice((1,)))
    assert plan_slices([100], [3, 5]) == (CpuSlice((3, 5)),)


@pytest.mark.parametrize("shares", [[0.0], [-1.0], [101.0], [60.0, 50.0], [float("nan")]])
def test_impossible_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(InputError):
        plan_slices(shares, [0, 1])


@given(st.lists(st.floats(0.5, 100.0), min_size=1, max_size=12), st.integers(1, 16))
def test_slices_give_what_was_asked_and_never_more_than_a_core(weights: list[float], cores: int) -> None:
    shares = [100.0 * weight / max(100.0, sum(weights)) for weight in weights]
    slices = plan_slices(shares, range(cores))
    whole = [core for part in slices for core in part.cores if part.quota_cores is None]
    assert len(whole) == len(set(whole))
    for share, part in zip(shares, slices, strict=True):
        assert part.amount_cores == pytest.approx(share * cores / 100.0, abs=1e-4)
        assert len(part.cores) >= part.threads or part.amount_cores <= len(part.cores) + 1e-4
        assert part.cores


def test_confining_changes_the_cores_only_inside() -> None:
    before = os.sched_getaffinity(0)
    with confine_to_share(CpuSlice((own_cores()[0],)), "test"):
        assert os.sched_getaffinity(0) == {own_cores()[0]}
    assert os.sched_getaffinity(0) == before


def test_a_core_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnavailableError, match="cannot run on cores 9999"), confine_to_share(CpuSlice((9999,)), "test"):
        pass


@pytest.mark.skipif(bool(_quota_reason()), reason=_quota_reason())
def test_a_quota_holds_a_busy_loop_to_its_part_of_a_core() -> None:
    with confine_to_share(CpuSlice((own_cores()[0],), 0.25), "test-quota"):
        cpu, wall = time.process_time(), time.monotonic()
        while time.monotonic() - wall < 0.4:
            pass
        used = (time.process_time() - cpu) / (time.monotonic() - wall)
    assert used < 0.45  # without the quota it would be 1 on an idle machine
    assert not (quota_parent()[0] / "gpuprof-test-quota").exists()


@pytest.mark.skipif(bool(_quota_reason()), reason=_quota_reason())
def test_groups_of_makers_that_are_gone_are_swept_away() -> None:
    parent, _ = quota_parent()
    stale, alive = parent / "gpuprof-4194305-x", parent / f"gpuprof-{os.getpid()}-x"  # no process has so high an id
    for path in (stale, alive):
        path.mkdir(exist_ok=True)
    try:
        with confine_to_share(CpuSlice((own_cores()[0],), 0.5), "test-sweep"):
            assert not stale.exists()
            assert alive.exists()
    finally:
        alive.rmdir()


RULE = "LIMIT = 2.0\n\ndef rule(a, b):\n    return a + b * LIMIT\n"
USER = """from made_up_rules.rule import rule

def use(a, b):
    return inner(a) + b

def inner(a):
    return rule(a, 1.0)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a rule and its user, in files that a test may change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "made_up_rules"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "rule.py").write_text(RULE)
    (folder / "user.py").write_text(USER)
    invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.startswith("made_up_rules")]:
        del sys.modules[name]


def test_the_directory_changes_with_the_sources_of_a_callee(package: Path) -> None:
    use = import_module("made_up_rules.user").use
    before = code_directory(use)
    assert code_directory(use) == before
    (package / "rule.py").write_text(RULE.replace("2.0", "3.0"))
    assert code_directory(use) != before


def test_compiled_functions_answer_as_plain_ones_and_are_kept_on_disk(package: Path) -> None:
    use = import_module("made_up_rules.user").use
    assert not is_machine_code_cached(use)
    assert compile_function(use)(4.0, 5.0) == use(4.0, 5.0) == 11.0
    assert is_machine_code_cached(use)
