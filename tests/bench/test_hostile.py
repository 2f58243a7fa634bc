"""What an attack may do, and how memory that is held is told from memory that grows."""

from __future__ import annotations

import pytest

from bench.hostile import AttackCase, Suffered, _find_excess
from bench.hostile_server import make_replicas


def suffered(
    own_ms: float = 0.0, computed_ms: float = 0.0, machine_ms: float = 0.0, left_mb: tuple[float, ...] = (100.0,)
) -> Suffered:
    return Suffered(
        500.0, own_ms, computed_ms, machine_ms, 10.0, 20.0, 100.0, 500.0, left_mb, 41.0 if len(left_mb) > 1 else 3.0
    )


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        (suffered(476.0, 40.0, 400.0), ""),  # the machine stood still
        (suffered(476.0, 40.0, 5.0), "STALL"),  # the router waited for something
        (suffered(150.0, 130.0, 100.0), "STALL"),  # it computed, whatever the machine did
        (suffered(left_mb=(150.0, 153.0)), ""),
        (suffered(left_mb=(150.0, 170.0, 185.0, 187.0)), ""),
        (suffered(left_mb=(150.0, 170.0, 190.0, 210.0)), "MEMORY"),
    ],
)
def test_the_router_is_blamed_for_what_it_does_and_not_for_the_machine(got: Suffered, wrong: str) -> None:
    assert _find_excess(AttackCase(lambda target, goes_on: None, False), got) == wrong


def test_who_has_the_token_may_cost_more() -> None:
    assert _find_excess(AttackCase(lambda target, goes_on: None, True), suffered(250.0, 250.0)) == ""


@pytest.mark.parametrize(("share_pct", "shares"), [(50.0, [25.0] * 4), (12.5, [12.5] * 4)])
def test_more_models_than_cores_share_the_machine(share_pct: float, shares: list[float]) -> None:
    replicas = make_replicas({"model": "m", "batch": 1, "sm_share_pct": share_pct}, list("abcd"))
    assert [replica["sm_share_pct"] for replica in replicas] == shares
    assert [replica["model"] for replica in replicas] == list("abcd")
