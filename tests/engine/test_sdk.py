"""The SDK against real engines, both of its clients."""

from collections.abc import Callable
from typing import Any

import pytest
from anyio import to_thread

from bidikv_sdk import AsyncBidiKV, BidiKV, LeaseLost, SessionNotFound, UnsupportedParameter

from .harness import POOL_BLOCKS, TINY, Rig, eventually, words

GREEDY = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}


def url(rig: Rig) -> str:
    """Return where the SDK finds D."""
    return f"{rig.stack.url}/v1"


def verify_turn(rig: Rig, turn: Any, outcome: str) -> None:
    """Check a turn's answer against a recompute, and what it says of itself."""
    (choice,) = turn.completion["choices"]
    assert choice["token_ids"] == rig.recomputed(turn.completion["prompt_token_ids"], len(choice["token_ids"]))
    assert turn.cache.outcome == outcome
    assert turn.cache.prompt_tokens == len(turn.completion["prompt_token_ids"])
    assert turn.lease.state == "active"
    if outcome == "fetched":
        assert turn.cache.fetched_tokens == turn.cache.held_tokens > 0


def renewals(rig: Rig, session: Any) -> Callable[[], bool]:
    """Return a question: has the lease been renewed since the last time it was asked?"""
    seen = [0.0]

    def renewed() -> bool:
        # The rest of a lease only ever grows by a renewal.
        (remaining_s,) = [info["lease"]["remaining_s"] for info in rig.sessions() if info["session"] == session.id]
        grown, seen[0] = remaining_s > seen[0] > 0, remaining_s
        return grown

    return renewed


def test_a_session(rig: Rig) -> None:
    """Send, hold around a slow tool, extend, list, release and end, with the synchronous client."""
    with BidiKV(url(rig), model=TINY) as client:
        with client.session(system="Be terse.", ttl_s=2.0, **GREEDY) as session:
            verify_turn(rig, session.send(words(80)), "recomputed")
            with session.hold() as hold:
                renewed = renewals(rig, session)
                for _ in range(4):  # one comes every half of the ttl: the tool outlasts the lease
                    eventually(renewed, "a renewal")
            assert not hold.lost
            assert session.status().lease.state == "active"
            verify_turn(rig, session.send("And now?", ttl_s=300), "fetched")
            assert session.extend(500).remaining_s > 490
            (listed,) = client.sessions()
            assert (listed.session, listed.turn, listed.cache) == (session.id, 2, None)
            with session.stream("And then?") as stream:
                text = "".join(stream.text_stream())
                turn = stream.final_turn()
            assert turn.text == text
            assert turn.cache.outcome == "fetched"
            with pytest.raises(UnsupportedParameter):
                session.send("Twice!", n=2)
            released = session.release()
            assert released.lease.state == "released"
            assert released.pool.free_blocks == POOL_BLOCKS
            with pytest.raises(LeaseLost):
                session.extend()
            turn = session.send("Still there?")
            verify_turn(rig, turn, "recomputed")
            assert turn.cache.reason == "released"
            assert turn.turn == session.turn == 4
        assert client.sessions() == []
        with pytest.raises(SessionNotFound):
            client.session(session.id).status()


@pytest.mark.anyio
async def test_an_async_session(rig: Rig) -> None:
    """Send, hold around a slow tool, extend, list, release and end, with the asynchronous client."""
    async with AsyncBidiKV(url(rig), model=TINY) as client:
        async with client.session(system="Be terse.", ttl_s=2.0, **GREEDY) as session:
            verify_turn(rig, await session.send(words(80)), "recomputed")
            async with session.hold() as hold:
                renewed = renewals(rig, session)
                for _ in range(4):
                    await to_thread.run_sync(eventually, renewed, "a renewal")
            assert not hold.lost
            assert (await session.status()).lease.state == "active"
            verify_turn(rig, await session.send("And now?", ttl_s=300), "fetched")
            assert (await session.extend(500)).remaining_s > 490
            (listed,) = await client.sessions()
            assert (listed.session, listed.turn, listed.cache) == (session.id, 2, None)
            async with session.stream("And then?") as stream:
                text = "".join([delta async for delta in stream.text_stream()])
                turn = await stream.final_turn()
            assert turn.text == text
            assert turn.cache.outcome == "fetched"
            with pytest.raises(UnsupportedParameter):
                await session.send("Twice!", n=2)
            released = await session.release()
            assert released.lease.state == "released"
            assert released.pool.free_blocks == POOL_BLOCKS
            with pytest.raises(LeaseLost):
                await session.extend()
            turn = await session.send("Still there?")
            verify_turn(rig, turn, "recomputed")
            assert turn.cache.reason == "released"
            assert turn.turn == session.turn == 4
        assert await client.sessions() == []


def test_a_stream_that_is_left(rig: Rig) -> None:
    """Leaving a stream early ends the turn on the server, and the session goes on without it."""
    with BidiKV(url(rig), model=TINY) as client, client.session(**GREEDY) as session:
        verify_turn(rig, session.send(words(80)), "recomputed")
        with session.stream("Everything!", max_tokens=1000, ignore_eos=True) as stream:
            next(iter(stream))
        verify_turn(rig, session.send("Something."), "fetched")
        assert session.turn == 2
