"""An agent of the OpenAI Agents SDK."""

import asyncio

from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool
from openai import AsyncOpenAI

from examples.frameworks.task import INSTRUCTIONS, MODEL, QUESTIONS, URL, look


async def main() -> None:
    """Ask all questions, one after the other."""
    client = AsyncOpenAI(base_url=URL, api_key="none")
    model = OpenAIChatCompletionsModel(MODEL, openai_client=client)
    agent = Agent("planner", instructions=INSTRUCTIONS, tools=[function_tool(look)], model=model)
    session = SQLiteSession("trips")
    async with client:
        for question in QUESTIONS:
            result = await Runner.run(agent, question, session=session)
            print(result.final_output)


asyncio.run(main())
