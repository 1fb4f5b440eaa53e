"""A LangGraph graph that goes back in time, and what that does to the cache.

    BIDIKV_BASE_URL=http://127.0.0.1:8200/v1 python examples/agents/langgraph_time_travel.py

A run from an earlier checkpoint is a branch of the thread's session: it shares the cache of what came before, computes
only what is new, and leaves the first future as it is.
"""

import os
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from bidikv_sdk.integrations.langchain import ChatBidiKV

THREAD: Any = {"configurable": {"thread_id": "story"}}
model = ChatBidiKV(model=os.environ.get("BIDIKV_MODEL", "smollm2"), temperature=0, max_tokens=48)


def tell(state: MessagesState) -> dict[str, Any]:
    """Go on with the story."""
    return {
        "messages": [model.invoke([SystemMessage("You tell a story, two sentences at a time."), *state["messages"]])]
    }


graph = StateGraph(MessagesState)
graph.add_node("tell", tell)
graph.add_edge(START, "tell")
app = graph.compile(checkpointer=InMemorySaver())


def go_on(wish: str, config: Any = THREAD) -> None:
    """Let the story go on as somebody wishes."""
    said = app.invoke({"messages": [HumanMessage(wish)]}, config)["messages"][-1]
    report = said.response_metadata["bidikv"]
    cache = report["cache"]
    print(f"[{report['session']}, turn {report['turn']}] {said.text}")
    print(f"-- {cache['outcome']}: {cache['fetched_tokens']} of {cache['prompt_tokens']} tokens fetched\n")


if __name__ == "__main__":
    for wish in ("There is a harbour.", "A ship comes in.", "It brings bad news."):
        go_on(wish)
    before_the_news = next(state for state in app.get_state_history(THREAD) if len(state.values["messages"]) == 4)
    go_on("It brings good news.", before_the_news.config)
    go_on("Everybody is happy.")  # the thread goes on in the branch
