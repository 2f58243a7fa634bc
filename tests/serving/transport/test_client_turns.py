from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from gpuprof.serving.transport.client_turns import ClientTurns
from gpuprof.serving.transport.inference import RefusedError


def works_of(turns: ClientTurns, done: list[str]) -> Callable[[str], Awaitable[None]]:
    async def work(client: str) -> None:
        async with turns.turn(client):
            await asyncio.sleep(0)
            done.append(client)

    return work


def test_a_client_waits_for_one_message_of_another_and_not_for_all() -> None:
    async def scene() -> None:
        done: list[str] = []
        work = works_of(ClientTurns(1), done)
        await asyncio.gather(*map(work, "aaaaaabab"))
        assert "".join(done) == "aaba" + "baaaa"

    asyncio.run(scene())


def test_who_has_too_many_is_refused_and_others_are_not() -> None:
    async def scene() -> None:
        done: list[str] = []
        work = works_of(ClientTurns(1, 2, "too many"), done)
        outcomes = await asyncio.gather(*map(work, "aaaaab"), return_exceptions=True)
        assert sorted(done) == ["a", "a", "a", "b"]
        refused = [one for one in outcomes if one is not None]
        assert len(refused) == 2 and all(isinstance(one, RefusedError) and one.overloaded for one in refused)

    asyncio.run(scene())


@pytest.mark.parametrize("has_turn", [False, True])
def test_what_is_cancelled_keeps_no_turn(has_turn: bool) -> None:
    async def scene() -> None:
        turns, done = ClientTurns(1), list[str]()
        work = works_of(turns, done)
        async with turns.turn("a"):
            cancelled, other = (asyncio.ensure_future(work(client)) for client in "bc")
            await asyncio.sleep(0)
            if not has_turn:
                cancelled.cancel()
        cancelled.cancel()  # given its turn just now, unless cancelled before
        with suppress(asyncio.CancelledError):
            await cancelled
        await other
        await work("d")
        assert done == ["c", "d"]

    asyncio.run(scene())
