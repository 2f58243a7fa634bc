"""Marks for the tests that are tried once more when they fail, each with its reason.

Only what waits for other processes by the clock may be: where the whole machine stands still for seconds, and shared
machines do, a sound program is late there. The summary counts each rerun and shows how the first try failed, so that
what needs them does not go unseen. A test that no mark is on fails the first time. ``tests/conftest.py`` refuses marks
without a reason.
"""

import pytest

#: Tests with a server whose clients, router and workers are processes or threads that wait for one another.
serves_in_real_time = pytest.mark.flaky(
    reruns=1, reason="clients, router and workers wait for one another by the clock, with time-outs"
)
#: Tests in which a profiler starts processes, times them, and gives up on them after a while.
measures_in_real_time = pytest.mark.flaky(
    reruns=1, reason="processes are started, timed and given up by the clock, and timings that scatter are refused"
)
#: Tests that start other programs, and end them or give them up at some moment.
waits_for_processes = pytest.mark.flaky(reruns=1, reason="another program is waited for, and ended, by the clock")
#: Tests that install something.
installs_packages = pytest.mark.flaky(reruns=1, reason="pip asks the package index, which may not answer")
