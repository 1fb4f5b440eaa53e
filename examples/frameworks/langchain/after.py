"""A LangChain agent."""

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import SecretStr

from bidikv_sdk.integrations.langchain import BidiKVMiddleware, ChatBidiKV
from examples.frameworks.task import INSTRUCTIONS, MODEL, QUESTIONS, URL, look

model = ChatBidiKV(base_url=URL, api_key=SecretStr("none"), model=MODEL)
hold = BidiKVMiddleware(model, release=False)
agent = create_agent(model, [look], system_prompt=INSTRUCTIONS, checkpointer=InMemorySaver(), middleware=[hold])

for question in QUESTIONS:
    state = agent.invoke({"messages": [HumanMessage(question)]}, {"configurable": {"thread_id": "trips"}})
    print(state["messages"][-1].text)
