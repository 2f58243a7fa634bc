from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuprof.kernel_db.store import KernelDb
from tests.kernel_db.rows import assert_sound

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


WRITER = """
import sys
from pathlib import Path
from gpuprof.kernel_db.store import KernelDb
from tests.kernel_db.rows import a_run
database = KernelDb.create(Path(sys.argv[1]))
for number in range(10):
    database.append(a_run(f"r{sys.argv[2]}-{number}"))
"""


@pytest.mark.slow
def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "db")]
    writers = [subprocess.Popen([*command, str(number)], cwd=ROOT) for number in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    database = KernelDb(tmp_path / "db")
    assert database.read_table("runs").num_rows == 30
    assert_sound(database)
