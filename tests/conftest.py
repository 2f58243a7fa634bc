"""What all tests share: how hypothesis, and tests of real processes, behave on machines that are busy."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Nothing asserts on wall-clock time, and hypothesis does so unless told otherwise.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

#: Parts whose tests start servers, workers and profilers, and wait for what these do in real time.
_WITH_PROCESSES = ("serving", "profiling", "cli")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Try a test of real processes once more when it fails: the machine may have stood still meanwhile.

    The summary counts each as a rerun, so that what needs them does not go unseen. Properties that hypothesis draws
    are not tried again: a counterexample is one.
    """
    here = Path(__file__).parent
    for item in items:
        part = item.path.relative_to(here).parts[0]
        drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if not drawn and (part in _WITH_PROCESSES or item.get_closest_marker("slow")):
            item.add_marker(pytest.mark.flaky(reruns=1))
