"""A LlamaIndex agent."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import Memory
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from bidikv_sdk.integrations.openai import async_http_client, current_session
from examples.frameworks.task import INSTRUCTIONS, MODEL, QUESTIONS, URL, look

llm = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    async_http_client=async_http_client(),  # pyright: ignore[reportCallIssue] - it says less than it takes
)
agent = FunctionAgent(tools=[FunctionTool.from_defaults(look)], llm=llm, system_prompt=INSTRUCTIONS)


async def main() -> None:
    """Ask all questions, one after the other."""
    memory = Memory.from_defaults("trips")
    for question in QUESTIONS:
        print(await agent.run(question, memory=memory))


with current_session("trips"):
    asyncio.run(main())
