"""How much memory that is free the process keeps."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

#: Threads that allocate at the same time, none of them the first; prints how many heaps of 64 MiB they have.
PROGRAM = """
import sys, threading
if sys.argv[1] == "limited":
    from gpuprof.serving.watch.memory import set_up_heaps
    set_up_heaps()
together = threading.Barrier(9)
def allocate():
    kept = [bytearray(3000) for _ in range(100)]
    together.wait()
    together.wait()
for _ in range(8):
    threading.Thread(target=allocate).start()
together.wait()
begins = [int(line.split("-")[0], 16) for line in open("/proc/self/maps") if len(line.split()) == 5]
print(sum(begin % (64 << 20) == 0 for begin in begins))
together.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="heaps are those of the GNU C library")
def test_threads_share_a_few_heaps() -> None:
    def heaps(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)

    assert heaps("unlimited") > 2
    assert heaps("limited") <= 2


#: Takes the memory of three large messages and gives it back, again and again; prints how many page faults that costs.
FAULTS = """
import resource, sys
if sys.argv[1] == "kept":
    from gpuprof.serving.watch.memory import set_up_heaps
    set_up_heaps()
def count_faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        [b"x" * (1 << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
count_faults(3)
print(count_faults(20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="heaps are those of the GNU C library")
def test_memory_of_one_message_serves_the_next_without_page_faults() -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)

    pages = 3 * (1 << 20) // mmap.PAGESIZE
    assert faults("returned") > 10 * pages
    assert faults("kept") < pages
