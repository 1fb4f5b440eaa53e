"""LangChain agents on `ChatBidiKV` with `BidiKVMiddleware`: the lease is held while tools run, and given back."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from bidikv_sdk.integrations.langchain import BidiKVMiddleware, ChatBidiKV
from bidikv_sdk.testing import FakeServer

THREAD: Any = {"configurable": {"thread_id": "t1"}}


def call(name: str, call_id: str = "call-1") -> dict[str, Any]:
    """Return a tool call without arguments."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def verbs(server: FakeServer) -> list[tuple[str, str | None]]:
    """Return what was asked of which session, one after the other, repeated renewals as one."""
    asked = [(request.verb, request.session_id) for request in server.requests]
    return [one for i, one in enumerate(asked) if i == 0 or one != asked[i - 1]]


async def run(agent: Any, text: str, *, is_async: bool) -> Any:
    """Run an agent."""
    messages = {"messages": [("user", text)]}
    return await agent.ainvoke(messages, THREAD) if is_async else agent.invoke(messages, THREAD)


@pytest.mark.parametrize("is_async", [False, True])
async def test_hold_and_release(
    server: FakeServer, model: ChatBidiKV, is_renewed: Callable[[], bool], is_async: bool
) -> None:
    """The thread is the session; a tool's time is covered by renewals; at the end the cache is given back."""

    def look() -> str:
        """Look for so long that the lease is renewed meanwhile."""
        while not is_renewed():
            pass
        return "Sunny."

    server.reply(tool_calls=[call("look")])
    server.reply("Sunny, then.")
    agent = create_agent(model, [look], middleware=[BidiKVMiddleware(model)], checkpointer=InMemorySaver())
    state = await run(agent, "Weather?", is_async=is_async)
    assert state["messages"][-1].text == "Sunny, then."
    assert verbs(server) == [("chat", "t1"), ("extend", "t1"), ("chat", "t1"), ("release", "t1")]
    cache = state["messages"][-1].response_metadata["bidikv"]["cache"]
    assert cache["fetched_tokens"] == cache["held_tokens"] > 0


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_thread_that_goes_on(server: FakeServer, model: ChatBidiKV, is_async: bool) -> None:
    """Without the release a later run of the thread begins on the cache of the earlier one."""
    middleware = BidiKVMiddleware(model, release=False)
    agent = create_agent(model, [], middleware=[middleware], checkpointer=InMemorySaver())
    await run(agent, "one two", is_async=is_async)
    state = await run(agent, "three", is_async=is_async)
    report = state["messages"][-1].response_metadata["bidikv"]
    assert (report["turn"], report["cache"]["outcome"]) == (2, "fetched")


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_tool_that_fails(server: FakeServer, model: ChatBidiKV, is_async: bool) -> None:
    """The hold ends with the tool, whatever becomes of it; the error is the agent's."""

    def look() -> str:
        """Look."""
        msg = "the window is dirty"
        raise RuntimeError(msg)

    server.reply(tool_calls=[call("look")])
    agent = create_agent(model, [look], middleware=[BidiKVMiddleware(model)])
    with pytest.raises(RuntimeError, match="dirty"):
        await run(agent, "Weather?", is_async=is_async)


def test_without_a_session_there_is_nothing_to_hold(server: FakeServer, model: ChatBidiKV) -> None:
    """An agent without a thread works as ever."""
    server.reply(tool_calls=[call("look")])

    def look() -> str:
        """Look."""
        return "Sunny."

    agent = create_agent(model, [look], middleware=[BidiKVMiddleware(model)])
    agent.invoke({"messages": [("user", "Weather?")]})
    assert verbs(server) == [("chat", None)]


def test_an_agent_that_is_another_ones_tool(server: FakeServer, model: ChatBidiKV) -> None:
    """It runs in a branch of the thread, and takes nothing from it."""
    inner = create_agent(model, [], middleware=[BidiKVMiddleware(model)], system_prompt="You are inside.")

    def look() -> str:
        """Look."""
        return inner.invoke({"messages": [("user", "From inside?")]})["messages"][-1].text

    server.reply(tool_calls=[call("look")])
    agent = create_agent(model, [look], middleware=[BidiKVMiddleware(model)], checkpointer=InMemorySaver())
    state = agent.invoke({"messages": [("user", "Weather?")]}, THREAD)
    chats = [request for request in server.requests if request.verb == "chat"]
    outer, branch, again = (chat.session_id for chat in chats)
    assert outer == again == "t1"
    assert branch is not None
    assert branch.startswith("t1~")
    assert chats[1].body["parent_session_id"] == chats[1].headers["x-parent-session-id"] == "t1"
    assert server.info(branch).lease.state == "released"
    cache = state["messages"][-1].response_metadata["bidikv"]["cache"]
    assert cache["fetched_tokens"] == cache["held_tokens"] > 0
