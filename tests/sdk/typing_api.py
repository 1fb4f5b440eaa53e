"""Never executed: the public API as a type checker must see it (`mypy tests/sdk/typing_api.py`)."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import httpx2
from typing_extensions import assert_type

from bidikv_sdk import (
    AsyncBidiKV,
    AsyncLeaseHold,
    AsyncSession,
    AsyncTurnStream,
    BidiKV,
    CacheReport,
    CapacityExceeded,
    ChatCompletion,
    ChatCompletionChunk,
    CurrentHold,
    CurrentSession,
    LeaseHold,
    LeaseInfo,
    PoolInfo,
    Session,
    SessionInfo,
    StreamInterrupted,
    Turn,
    TurnStream,
    active_session,
    async_session_transport,
    current_session,
    session_transport,
)
from bidikv_sdk.prefix import common_prefix_length, num_blocks
from bidikv_sdk.testing import FakeServer, ManualClock
from bidikv_sdk.wire import LeaseState, Outcome, Reason


def check_turn(turn: Turn) -> None:
    """Check what a turn holds."""
    assert_type(turn.text, str)
    assert_type(turn.tool_calls, list[dict[str, Any]])
    assert_type(turn.completion, ChatCompletion)
    assert_type(turn.completion["choices"][0]["finish_reason"], str | None)
    assert_type(turn.lease, LeaseInfo)
    assert_type(turn.lease.state, LeaseState)
    assert_type(turn.cache, CacheReport)
    assert_type(turn.cache.outcome, Outcome)
    assert_type(turn.cache.reason, Reason)
    assert_type(turn.cache.timings_s.ttft, float | None)
    assert_type(turn.pool, PoolInfo)
    assert_type(turn.finish_reason, str | None)
    assert_type(turn.request_id, str | None)
    assert_type(turn.reopened, bool)
    assert_type(turn.turn, int)


def check_sync() -> None:
    """Check the synchronous flavour."""
    with BidiKV("http://a/v1", "key", timeout=None, max_retries=0, default_headers={"a": "b"}, model="m") as client:
        assert_type(client, BidiKV)
        assert_type(client.sessions(), list[SessionInfo])
        with client.session("id", system="s", tools=[{}], route="fetch", ttl_s=1, temperature=0.5) as session:
            assert_type(session, Session)
            check_turn(session.send("text"))
            check_turn(session.send({"role": "user", "content": "x"}, route="local", ttl_s=2.5, timeout=3))
            check_turn(session.send([{"role": "tool", "tool_call_id": "1", "content": "x"}], max_tokens=5))
            with session.stream("text") as stream:
                assert_type(stream, TurnStream)
                for chunk in stream:
                    assert_type(chunk, ChatCompletionChunk)
                assert_type(stream.text_stream, Iterator[str])
                check_turn(stream.final_turn())
            with session.hold(ttl_s=3) as hold:
                assert_type(hold, LeaseHold)
                assert_type(hold.lost, bool)
                assert_type(hold.lost_reason, str | None)
            assert_type(session.extend(5), LeaseInfo)
            assert_type(session.release(), SessionInfo)
            assert_type(session.status(), SessionInfo)
            assert_type(session.lease, LeaseInfo | None)
            assert_type(session.transcript, list[dict[str, Any]])
            assert_type(session.rewind(1), None)
            assert_type(session.replace_history([{"role": "user", "content": "x"}]), None)
            with session.fork(at_turn=1, ttl_s=5) as child:
                assert_type(child, Session)
            assert_type(client.resume(session.id, session.transcript, turn=1, tools=[{}], temperature=0.5), Session)
            session.send("x", route="warp")  # type: ignore[arg-type]
            session.send(7)  # type: ignore[arg-type]


async def check_async() -> None:
    """Check the asynchronous flavour."""
    async with AsyncBidiKV() as client:
        assert_type(client, AsyncBidiKV)
        assert_type(await client.sessions(), list[SessionInfo])
        async with client.session() as session:
            assert_type(session, AsyncSession)
            check_turn(await session.send("text"))
            async with session.stream("text") as stream:
                assert_type(stream, AsyncTurnStream)
                async for chunk in stream:
                    assert_type(chunk, ChatCompletionChunk)
                assert_type(stream.text_stream, AsyncIterator[str])
                check_turn(await stream.final_turn())
            async with session.hold() as hold:
                assert_type(hold, AsyncLeaseHold)
            assert_type(await session.extend(), LeaseInfo)
            assert_type(await session.release(), SessionInfo)
            assert_type(await session.status(), SessionInfo)
            await session.rewind(1)
            await session.replace_history([])
            async with await session.fork() as child:
                assert_type(child, AsyncSession)
            assert_type(client.resume(session.id, session.transcript), AsyncSession)
            await session.end()
        await client.close()


def check_errors(session: Session) -> None:
    """Check what errors carry."""
    try:
        session.send("x")
    except CapacityExceeded as error:
        assert_type(error.retry_after_s, float | None)
    except StreamInterrupted as error:
        assert_type(error.partial_text, str)


def check_testing_and_prefix() -> None:
    """Check the test double and the prefix algebra."""
    server = FakeServer(ttl_s=5, api_key="k")
    assert_type(server.client(max_retries=0), BidiKV)
    assert_type(server.async_client(), AsyncBidiKV)
    server.reply("x", outcome="local", reason="forced")
    server.fail("lease_lost", reason="released", on="extend")
    server.fail("no_such_code")  # type: ignore[arg-type]
    assert_type(common_prefix_length(b"", [1]), int)
    assert_type(num_blocks(3, 2), int)


async def check_stock_clients() -> None:
    """Check what stock clients are given, and the session that is current."""
    assert_type(session_transport(httpx2), httpx2.BaseTransport)
    assert_type(async_session_transport(httpx2), httpx2.AsyncBaseTransport)
    httpx.Client(transport=session_transport(httpx, httpx.HTTPTransport()))
    httpx2.AsyncClient(transport=async_session_transport(httpx2, httpx2.AsyncHTTPTransport(), clock=ManualClock()))
    httpx.Client(transport=session_transport(httpx2))  # type: ignore[arg-type]
    with current_session("s", on_exit="release") as session:
        assert_type(session, CurrentSession)
        assert_type(session.cache, CacheReport | None)
        with session.hold(ttl_s=3) as hold:
            assert_type(hold, CurrentHold)
        async with session.hold() as hold:
            assert_type(hold.lost, bool)
        async with session.fork("t") as child:
            assert_type(child, CurrentSession)
        assert_type(session.release(), SessionInfo | None)
        assert_type(await session.end_async(), SessionInfo | None)
    assert_type(active_session(), CurrentSession | None)
    current_session(on_exit="drop")  # type: ignore[arg-type]
