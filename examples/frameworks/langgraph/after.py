"""A LangGraph graph: a model and its tools."""

from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr

from bidikv_sdk.integrations.langchain import ChatBidiKV
from examples.frameworks.task import INSTRUCTIONS, MODEL, QUESTIONS, URL, look

model = ChatBidiKV(base_url=URL, api_key=SecretStr("none"), model=MODEL).bind_tools([look])


def think(state: MessagesState) -> dict[str, Any]:
    """Ask the model."""
    return {"messages": [model.invoke([SystemMessage(INSTRUCTIONS), *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([look]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
app = graph.compile(checkpointer=InMemorySaver())

for question in QUESTIONS:
    state = app.invoke({"messages": [HumanMessage(question)]}, {"configurable": {"thread_id": "trips"}})
    print(state["messages"][-1].text)
