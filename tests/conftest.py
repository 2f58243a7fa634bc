"""What all tests share: how hypothesis behaves on machines that are busy, and which tests may be tried again."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Nothing asserts on wall-clock time, and hypothesis does so unless told otherwise. The same examples are drawn each
# time, so that a change fails for what it changed; HYPOTHESIS_SEARCH=1 draws others, to find what nobody thought of.
settings.register_profile(
    "unhurried",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("HYPOTHESIS_SEARCH"),
)
settings.load_profile("unhurried")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse reruns that no reason is given for; properties that hypothesis draws are never tried again.

    Where tests run in several processes, each begins with its part of the slow ones: else one of minutes that begins
    last leaves all other processes idle.

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
        items[:] = deal_slow_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def deal_slow_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the items so that each of ``workers`` equal parts begins with slow ones, dealt in turn.

    ``--dist worksteal`` gives each process such a part. Slow tests of a file that share a fixture stay together.
    """
    groups: dict[object, list[pytest.Item]] = {}
    quick: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("slow") is None:
            quick.append(item)
        else:
            groups.setdefault(item.path if _shares_fixture(item) else item.nodeid, []).append(item)
    dealt: list[pytest.Item] = []
    in_turn = list(groups.values())
    for worker in range(workers):
        part = (len(items) - len(dealt)) // (workers - worker)
        slow = [item for group in in_turn[worker::workers] for item in group]
        fill = max(0, part - len(slow))
        dealt += [*slow, *quick[:fill]]
        quick = quick[fill:]
    return dealt + quick


def _shares_fixture(item: pytest.Item) -> bool:
    fixtures = getattr(item, "_fixtureinfo", None)
    found = () if fixtures is None else [one for many in fixtures.name2fixturedefs.values() for one in many]
    return any(one.scope != "function" and one.baseid and one.baseid in item.nodeid for one in found)
