import errno
import fcntl
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from gpuprof.errors import InputError
from gpuprof.kernel_db import store
from gpuprof.kernel_db.store import KernelDb, compact_if_due, merge_segments
from tests.kernel_db.rows import a_run, assert_sound


class KilledWriter(BaseException):
    """Stands for SIGKILL at one place."""


def _database(path: Path) -> KernelDb:
    database = KernelDb.create(path)
    for number in range(4):
        database.append(a_run(f"r{number}", batch=number + 1))
    return database


def _ids(database: KernelDb) -> list[str]:
    return sorted(database.read_table("models").column("run_id").to_pylist())


def test_compaction_keeps_every_row_and_shrinks_the_database(tmp_path: Path) -> None:
    database = _database(tmp_path / "db")
    result = merge_segments(database)
    assert (result.segments_before, result.segments_after) == (4, 1)
    assert result.bytes_after < result.bytes_before
    assert _ids(database) == ["r0", "r1", "r2", "r3"]
    assert_sound(database)


def test_runs_that_come_later_are_read_beside_it_and_compacted_again(tmp_path: Path) -> None:
    database = _database(tmp_path / "db")
    merge_segments(database)
    database.append(a_run("r9"))
    assert _ids(database) == ["r0", "r1", "r2", "r3", "r9"]
    merge_segments(database)
    assert len(database.segments()) == 1
    assert database.read_table("kernels").num_rows == 15


@pytest.mark.parametrize("place", ["other/table.parquet", "r1/notes.txt"])
def test_what_gpuprof_did_not_write_is_neither_merged_nor_removed(tmp_path: Path, place: str) -> None:
    database = _database(tmp_path / "db")
    foreign = database.path / place
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(b"mine")
    merge_segments(database)
    assert foreign.read_bytes() == b"mine" and not (database.path / "r0").exists()


@pytest.mark.parametrize("moment", ["before", "first", "second", "third"])
def test_a_killed_compaction_keeps_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    database = _database(tmp_path / "db")
    removals = {"before": -1, "first": 0, "second": 1, "third": 2}[moment]
    removed: list[Path] = []

    def dying(path: Path) -> None:
        if len(removed) == removals:
            raise KilledWriter
        removed.append(path)
        shutil.rmtree(path)

    def no_writing(*_: object) -> None:
        raise KilledWriter

    with monkeypatch.context() as patch:
        patch.setattr(store, "remove_segment", dying)
        if moment == "before":
            patch.setattr(store, "write_segment", no_writing)
        with pytest.raises(KilledWriter):
            merge_segments(database)
    assert _ids(database) == ["r0", "r1", "r2", "r3"]
    database.clear_leftovers()
    database.append(a_run("r5"))
    merge_segments(database)
    assert _ids(database) == ["r0", "r1", "r2", "r3", "r5"]


@pytest.mark.slow
def test_no_acknowledged_run_is_lost_while_four_processes_append_and_compact(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        written = list(pool.map(_append_and_compact, [path] * 4, range(4)))
    assert _ids(KernelDb(path)) == sorted(run_id for some in written for run_id in some)
    assert_sound(KernelDb(path))


def _append_and_compact(path: Path, writer: int, runs: int = 100) -> list[str]:
    store._MOST_RUNS = 4
    database = KernelDb.create(path)
    acknowledged = []
    for number in range(runs):
        database.append(a_run(f"w{writer}-{number:04}", kernels=1))
        acknowledged.append(f"w{writer}-{number:04}")
        compact_if_due(database)
    return acknowledged


def test_a_second_compaction_is_refused_unless_it_was_only_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = _database(tmp_path / "db")
    with (database.path / ".compact.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another compaction"):
            merge_segments(database)
        monkeypatch.setattr(store, "_MOST_RUNS", 2)
        compact_if_due(database)
    assert len(database.segments()) == 4


def test_compacting_when_due_keeps_segments_few_and_rows_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_RUNS", 3)
    database = KernelDb.create(tmp_path / "db")
    for number in range(20):
        database.append(a_run(f"r{number:02}"))
        compact_if_due(database)
        assert len(database.segments()) <= 5
    assert _ids(database) == [f"r{number:02}" for number in range(20)]
    assert_sound(database)


def test_on_a_full_disk_compacting_says_so_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    database = _database(tmp_path / "db")
    monkeypatch.setattr(store, "write_segment", full)
    with pytest.raises(InputError, match=r"cannot write to the kernel database .*no space left on device"):
        merge_segments(database)
    monkeypatch.setattr(store, "_MOST_RUNS", 2)
    compact_if_due(database)  # whoever appends the next run is told
    assert _ids(database) == ["r0", "r1", "r2", "r3"]
    assert_sound(database)


def test_a_database_that_may_only_be_read_is_not_compacted(tmp_path: Path) -> None:
    database = _database(tmp_path / "db")
    (database.path / ".compact.lock").mkdir()  # stands for a file system that takes no lock file
    with pytest.raises(InputError, match="cannot write to the kernel database"):
        merge_segments(database)


ROOT = Path(__file__).parents[2]
KILLS = 200
KERNELS = 40

# A process that loads the libraries once and forks, so that 200 writers take seconds.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from gpuprof.kernel_db.store import KernelDb
from tests.kernel_db.rows import a_run

path, kills, kernels = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
database = KernelDb.create(path)
database.append(a_run("first", kernels=kernels))  # the first write of a process is a slow one
start = time.monotonic()
for number in range(5):
    database.append(a_run(f"second{number}", kernels=kernels))
one_s = min(0.1, (time.monotonic() - start) / 5)  # what a run takes here and now
draw = random.Random(0)
for kill in range(kills):
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        database = KernelDb.create(path)
        for number in range(10_000):
            os.write(said, b".")
            database.append(a_run(f"r{kill:04}-{number:06}", kernels=kernels))
    for _ in range(draw.randint(1, 3)):  # runs that it has begun: by no clock, whatever else goes on
        os.read(heard, 1)
    time.sleep(draw.uniform(0.0, one_s))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    os.close(heard), os.close(said)
"""


@pytest.mark.slow
def test_whatever_moment_a_writer_is_killed_at_every_run_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "db"
    subprocess.run([sys.executable, "-c", KILLER, str(path), str(KILLS), str(KERNELS)], cwd=ROOT, check=True)
    database = KernelDb(path)
    runs = set(database.read_table("runs").column("run_id").to_pylist())
    counts = database.read_table("kernels").group_by("run_id").aggregate([("run_id", "count")]).to_pylist()
    assert {row["run_id"]: row["run_id_count"] for row in counts} == dict.fromkeys(runs, KERNELS)
    assert len(runs) > 100  # most of the killed ones had written some
    database.clear_leftovers()
    assert_sound(database)
