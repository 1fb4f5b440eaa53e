"""The OpenAI Agents SDK with `BidiKVSession` and its hooks, on a fake server."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool
from agents.memory import Session

from bidikv_sdk.integrations.openai_agents import BidiKVSession
from bidikv_sdk.testing import FakeServer

pytestmark = pytest.mark.anyio


def call(name: str, call_id: str = "call-1") -> dict[str, Any]:
    """Return a tool call without arguments."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def verbs(server: FakeServer) -> list[tuple[str, str | None]]:
    """Return what was asked of which session, one after the other, repeated renewals as one."""
    asked = [(request.verb, request.session_id) for request in server.requests]
    return [one for i, one in enumerate(asked) if i == 0 or one != asked[i - 1]]


async def test_it_is_a_session_of_theirs(server: FakeServer) -> None:
    """It delegates to the one it wraps, and is one itself."""
    inner = SQLiteSession("s1")
    session = BidiKVSession(inner)
    assert isinstance(session, Session)
    assert session.session_id == "s1"
    items: list[Any] = [{"role": "user", "content": str(i)} for i in range(3)]
    await session.add_items(items)
    assert await session.get_items() == await inner.get_items() == items
    assert await session.get_items(1) == items[-1:]
    assert await session.pop_item() == items[-1]
    await session.clear_session()
    assert await inner.get_items() == []
    assert await session.pop_item() is None
    assert server.requests == []


async def test_tools_are_held(
    server: FakeServer, model: OpenAIChatCompletionsModel, is_renewed: Callable[[], bool]
) -> None:
    """While a tool runs the lease is renewed, and the turn behind it fetches all that is held."""

    @function_tool
    async def look() -> str:
        """Look."""
        while not is_renewed():  # noqa: ASYNC110 - what is waited for happens in another thread
            await asyncio.sleep(0)
        return "Sunny."

    agent = Agent("planner", tools=[look], model=model)
    server.reply(tool_calls=[call("look")])
    server.reply("Sunny, then.")
    async with BidiKVSession(SQLiteSession("s1"), on_exit="release") as session:
        result = await Runner.run(agent, "Weather?", session=session, hooks=session.hooks)
        assert result.final_output == "Sunny, then."
        cache = session.cache
        assert cache is not None
        assert cache.fetched_tokens == cache.held_tokens > 0
        assert server.info("s1").lease.state == "active"
    assert verbs(server) == [("chat", "s1"), ("extend", "s1"), ("chat", "s1"), ("release", "s1")]


async def test_a_failed_tool_is_let_go(server: FakeServer, model: OpenAIChatCompletionsModel) -> None:
    """A tool that raises out of the run leaves no renewals behind."""

    @function_tool(failure_error_function=None)
    async def look() -> str:
        """Look."""
        msg = "the window is dirty"
        raise RuntimeError(msg)

    agent = Agent("planner", tools=[look], model=model)
    server.reply(tool_calls=[call("look")])
    async with BidiKVSession(SQLiteSession("s1")) as session:
        with pytest.raises(Exception, match="dirty"):
            await Runner.run(agent, "Weather?", session=session, hooks=session.hooks)
        assert [task.get_name() for task in asyncio.all_tasks()].count("bidikv-hold") == 1
    assert "bidikv-hold" not in [task.get_name() for task in asyncio.all_tasks()]


async def test_hand_off(server: FakeServer, model: OpenAIChatCompletionsModel) -> None:
    """The next agent speaks in a branch, the first one goes on where it was, and both keep their leases."""
    second = Agent("second", instructions="You are the second.", model=model)
    first = Agent("first", instructions="You are the first.", model=model, handoffs=[second])
    server.reply("I am the first.")
    server.reply(tool_calls=[call("transfer_to_second")])
    server.reply("I am the second.")
    server.reply("The second again.")
    server.reply("The first again.")
    async with BidiKVSession(SQLiteSession("s1")) as session:
        for agent, text in ((first, "Hello"), (first, "The other one, please"), (second, "More"), (first, "And you?")):
            await Runner.run(agent, text, session=session, hooks=session.hooks)
    chats = [request for request in server.requests if request.verb == "chat"]
    branch = chats[2].session_id
    assert branch is not None
    assert branch.startswith("s1~")
    assert [chat.session_id for chat in chats] == ["s1", "s1", branch, branch, "s1"]
    assert chats[2].body["parent_session_id"] == chats[2].headers["x-parent-session-id"] == "s1"
    assert {server.info(name).lease.state for name in ("s1", branch)} == {"active"}
    # What the first agent had is continued, though the second one spoke in between.
    assert server.info("s1").turn == 3


async def test_pop_item_truncates(server: FakeServer, model: OpenAIChatCompletionsModel) -> None:
    """Taking an answer back ends the session's cache before it; taking back a question changes nothing there."""
    agent = Agent("planner", model=model)
    async with BidiKVSession(SQLiteSession("s1")) as session:
        for text in ("one two three", "four five six"):
            await Runner.run(agent, text, session=session, hooks=session.hooks)
        num_tokens = server.info("s1").lease.num_tokens
        await session.pop_item()
        assert server.info("s1").turn == 1
        assert 0 < server.info("s1").lease.num_tokens < num_tokens
        await session.pop_item()
        assert [request.verb for request in server.requests].count("rewind") == 1
        await Runner.run(agent, "instead", session=session, hooks=session.hooks)
        assert session.info is not None
        assert session.info.turn == 2
        assert session.info.cache is not None
        assert session.info.cache.fetched_tokens == session.info.cache.held_tokens


async def test_clear_session_gives_back(server: FakeServer, model: OpenAIChatCompletionsModel) -> None:
    """Clearing the history forgets the session on the server, its branches too."""
    second = Agent("second", model=model)
    first = Agent("first", model=model, handoffs=[second])
    server.reply(tool_calls=[call("transfer_to_second")])
    server.reply("I am the second.")
    async with BidiKVSession(SQLiteSession("s1")) as session:
        await Runner.run(first, "The other one, please", session=session, hooks=session.hooks)
        await session.clear_session()
        for name in {request.session_id for request in server.requests}:
            with pytest.raises(KeyError):
                server.info(str(name))
        await Runner.run(first, "Hello", session=session, hooks=session.hooks)
        assert server.info("s1").turn == 1


async def test_an_agent_that_is_a_tool(server: FakeServer, model: OpenAIChatCompletionsModel) -> None:
    """It has a branch of its own, and takes nothing from the agent that called it."""
    inner = Agent("inner", instructions="You are inside.", model=model)
    tool = inner.as_tool("ask_inside", "Ask inside.")
    outer = Agent("outer", tools=[tool], model=model)
    arguments = {"name": "ask_inside", "arguments": '{"input": "From inside?"}'}
    server.reply(tool_calls=[{"id": "call-1", "type": "function", "function": arguments}])
    server.reply("Inside.")
    server.reply("Outside.")
    async with BidiKVSession(SQLiteSession("s1")) as session:
        await Runner.run(outer, "Ask.", session=session, hooks=session.hooks)
    chats = [request.session_id for request in server.requests if request.verb == "chat"]
    assert chats[0] == chats[2] == "s1"
    assert str(chats[1]).startswith("s1~")
    assert server.info("s1").turn == 2


def test_run_sync(server: FakeServer, url: str) -> None:
    """A synchronous program uses `with`."""
    from openai import AsyncOpenAI

    from bidikv_sdk.integrations.openai_agents import async_http_client

    client = AsyncOpenAI(base_url=url, api_key="none", http_client=async_http_client())
    agent = Agent("planner", model=OpenAIChatCompletionsModel("fake", openai_client=client))
    with BidiKVSession(SQLiteSession("s1")) as session:
        Runner.run_sync(agent, "Hello", session=session, hooks=session.hooks)
    assert verbs(server) == [("chat", "s1")]
