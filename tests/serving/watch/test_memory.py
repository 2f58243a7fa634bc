"""How much memory that is free the process keeps."""

from __future__ import annotations

import asyncio
import mmap
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.watch import memory
from gpuprof.serving.watch.memory import FreeMemory

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


class Process:
    """What a process has in memory, as the test says; ``returned`` counts how often it gave back what is free."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.private_bytes = 50 << 20
        self.returned = 0
        patch.setattr(memory, "private_bytes", lambda: self.private_bytes)
        patch.setattr(memory, "return_free_memory", self._return_all)
        patch.setattr("time.thread_time", lambda: 0.0)

    def _return_all(self) -> None:
        self.returned += 1


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 30)
    yield arena
    arena.close()


def test_free_memory_is_returned_when_nobody_has_asked_for_a_while(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, free = Process(monkeypatch), FreeMemory(arena, 0.0)

    async def look(now: float, is_asked: bool = False) -> bool:
        return await free.return_free(now, is_asked)

    async def main() -> None:
        assert not await look(2.0) and not await look(2.5, is_asked=True) and not await look(5.0)
        assert process.returned == 0
        assert await look(6.0) and process.returned == 1
        assert not await look(7.0)

    asyncio.run(main())


def test_far_more_than_requests_need_is_returned_while_there_are_requests(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, free = Process(monkeypatch), FreeMemory(arena, 0.0)

    async def main() -> None:
        process.private_bytes += 200 << 20
        assert arena.charge(150 << 20)
        assert not await free.return_free(0.5, True) and process.returned == 0
        arena.discharge(150 << 20)
        assert not await free.return_free(1.0, True) and process.returned == 1

    asyncio.run(main())
