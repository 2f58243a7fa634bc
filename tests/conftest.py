"""What all tests share: how hypothesis behaves on machines that are busy, and which tests may be tried again."""

import pytest
from hypothesis import HealthCheck, settings

# Nothing asserts on wall-clock time, and hypothesis does so unless told otherwise.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse reruns that no reason is given for; properties that hypothesis draws are never tried again.

    Where tests run in several processes, files with slow tests come first: else one of minutes that begins last leaves
    all other processes idle.

    Raises
    ------
    pytest.UsageError
        For a mark ``flaky`` without ``reason``.
    """
    for item in items:
        mark = item.get_closest_marker("flaky")
        if mark is None:
            continue
        if not str(mark.kwargs.get("reason") or "").strip():
            raise pytest.UsageError(f"{item.nodeid} is marked flaky without a reason: see tests/reruns.py")
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):  # a counterexample is one
            item.add_marker(pytest.mark.flaky(reruns=0, reason="a counterexample is not tried again"), append=False)
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
        items.sort(key=lambda item: item.path not in slow)
