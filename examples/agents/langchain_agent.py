"""A LangChain agent whose threads are sessions.

    BIDIKV_BASE_URL=http://127.0.0.1:8200/v1 python examples/agents/langchain_agent.py "Is it warm in Paris?"

`ChatBidiKV` takes the thread for the session, and the middleware keeps its lease alive around every tool call.
"""

import os
import sys
from typing import Literal

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from bidikv_sdk.integrations.langchain import BidiKVMiddleware, ChatBidiKV


@tool
def look(city: Literal["Oslo", "Paris"]) -> str:
    """Look at the weather in a city."""
    return {"Oslo": "Rain, 9 degrees.", "Paris": "Sunny, 21 degrees."}[city]


def run(questions: list[str]) -> None:
    """Ask one question after the other in one thread."""
    model = ChatBidiKV(model=os.environ.get("BIDIKV_MODEL", "smollm2"), temperature=0)
    agent = create_agent(
        model,
        [look],
        system_prompt="You tell people about the weather. Look before you answer.",
        middleware=[BidiKVMiddleware(model, release=False)],
        checkpointer=InMemorySaver(),
    )
    for question in questions:
        state = agent.invoke({"messages": [HumanMessage(question)]}, {"configurable": {"thread_id": "weather"}})
        answer = state["messages"][-1]
        report = answer.response_metadata["bidikv"]
        print(f"{answer.text}\n-- {report['cache']['outcome']}: {report['cache']['computed_tokens']} tokens computed")
    model.session("weather").release()


if __name__ == "__main__":
    run(sys.argv[1:] or ["Is it warm in Paris?", "And in Oslo?"])
