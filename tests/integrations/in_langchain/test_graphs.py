"""LangGraph: threads are sessions, sub-graphs and earlier checkpoints are branches of them."""

from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from bidikv_sdk.integrations.langchain import ChatBidiKV
from bidikv_sdk.testing import FakeServer

THREAD: Any = {"configurable": {"thread_id": "t1"}}


def graph_of(
    model: ChatBidiKV, *, name: str = "think", asks: str = "", checkpointer: Any = None, behind: Any = None
) -> Any:
    """Return a graph that asks the model once (`asks`: with a question of its own), and then runs another graph."""

    def think(state: MessagesState) -> dict[str, Any]:
        new: list[Any] = [HumanMessage(asks)] if asks else []
        return {"messages": [*new, model.invoke([SystemMessage("Be terse."), *state["messages"], *new])]}

    graph = StateGraph(MessagesState)
    graph.add_node(name, think)
    graph.add_edge(START, name)
    if behind is not None:
        graph.add_node("behind", behind)
        graph.add_edge(name, "behind")
    return graph.compile(checkpointer=checkpointer)


def reports(state: Any) -> list[dict[str, Any]]:
    """Return the reports of all answers."""
    return [m.response_metadata["bidikv"] for m in state["messages"] if m.type == "ai"]


def tell(app: Any, text: str, config: Any = THREAD) -> Any:
    """Run a graph with a user's message."""
    return app.invoke({"messages": [("user", text)]}, config)


def before_the_end(app: Any, num_messages: int) -> Any:
    """Return the configuration of the latest checkpoint with so many messages."""
    states = app.get_state_history(THREAD)
    return next(s.config for s in states if len(s.values["messages"]) == num_messages and not s.next)


def test_a_thread(server: FakeServer, model: ChatBidiKV) -> None:
    """Its turns are those of one session, with no branch."""
    app = graph_of(model, checkpointer=InMemorySaver())
    for text in ("one", "two", "three"):
        state = tell(app, text)
    assert [(r["session"], r["turn"]) for r in reports(state)] == [("t1", 1), ("t1", 2), ("t1", 3)]
    assert not any("parent_session_id" in request.body for request in server.requests)


def test_time_travel(server: FakeServer, model: ChatBidiKV) -> None:
    """A run from an earlier checkpoint branches off there; later runs go on in the branch; the old future stays."""
    app = graph_of(model, checkpointer=InMemorySaver())
    for text in ("one", "two", "three"):
        tell(app, text)
    state = tell(app, "instead", before_the_end(app, 2))
    (first, second) = reports(state)
    assert first["session"] == "t1"
    branch = second["session"]
    assert branch.startswith("t1~")
    assert (second["turn"], second["cache"]["outcome"]) == (2, "fetched")
    assert second["cache"]["fetched_tokens"] > 0
    assert server.info("t1").turn == 3
    assert server.info("t1").lease.state == "active"
    state = tell(app, "and then")
    assert [(r["session"], r["turn"]) for r in reports(state)] == [("t1", 1), (branch, 2), (branch, 3)]
    cache = reports(state)[-1]["cache"]
    assert cache["fetched_tokens"] == cache["held_tokens"]


def test_the_same_checkpoint_twice(server: FakeServer, model: ChatBidiKV) -> None:
    """A second try from one checkpoint takes the place of the first, and fetches what they share."""
    app = graph_of(model, checkpointer=InMemorySaver())
    for text in ("one", "two"):
        tell(app, text)
    config = before_the_end(app, 2)
    first = reports(tell(app, "instead", config))[-1]
    second = reports(tell(app, "or else", config))[-1]
    assert (first["session"], first["turn"]) == (second["session"], second["turn"])
    assert second["cache"]["fetched_tokens"] > 0


def test_a_subgraph(server: FakeServer, model: ChatBidiKV) -> None:
    """It branches off where its graph is; the graph goes on in the branch that continues its history."""
    app = graph_of(model, checkpointer=InMemorySaver(), behind=graph_of(model, name="inner", asks="Really?"))
    state = tell(app, "one")
    outer, inner = reports(state)
    assert outer["session"] == "t1"
    assert inner["session"].startswith("t1~")
    assert inner["turn"] == 2
    assert inner["cache"]["fetched_tokens"] == inner["cache"]["held_tokens"] > 0
    outer, _, again, _ = reports(tell(app, "two"))
    assert (again["session"], again["turn"]) == (inner["session"], 3)
    assert again["cache"]["fetched_tokens"] == again["cache"]["held_tokens"]


@pytest.mark.parametrize("thread_id", ["with/slash", "with~tilde", "ünïcode", "x" * 300, 17])
def test_any_thread_id(server: FakeServer, model: ChatBidiKV, thread_id: Any) -> None:
    """A thread whose name cannot be a session's has one all the same, and always the same one."""
    app = graph_of(model, checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": thread_id}}
    tell(app, "one", config)
    state = tell(app, "two", config)
    assert [r["turn"] for r in reports(state)] == [1, 2]
