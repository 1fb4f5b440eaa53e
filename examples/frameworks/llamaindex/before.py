"""A LlamaIndex agent."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import Memory
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from examples.frameworks.task import INSTRUCTIONS, MODEL, QUESTIONS, URL, look

llm = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
)
agent = FunctionAgent(tools=[FunctionTool.from_defaults(look)], llm=llm, system_prompt=INSTRUCTIONS)


async def main() -> None:
    """Ask all questions, one after the other."""
    memory = Memory.from_defaults("trips")
    for question in QUESTIONS:
        print(await agent.run(question, memory=memory))


asyncio.run(main())
