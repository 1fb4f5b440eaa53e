"""Two agents of the OpenAI Agents SDK; one hands over to the other.

    BIDIKV_BASE_URL=http://127.0.0.1:8200/v1 python examples/agents/openai_agents_handoff.py

The conversation lies in their own session, its cache in ours: held while tools run, branched off at a hand-off, so that
each agent finds its own context when it speaks again.
"""

import asyncio
import os

from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool
from openai import AsyncOpenAI

from bidikv_sdk.integrations.openai_agents import BidiKVSession, async_http_client

QUESTIONS = ("I would like to go to Oslo.", "Is it dry there?", "Then book it.")


@function_tool
def weather(city: str) -> str:
    """Look at the weather in a city."""
    return f"{city}: dry, 12 degrees."


async def run(client: AsyncOpenAI) -> None:
    """Have a conversation with whichever agent is in charge."""
    model = OpenAIChatCompletionsModel(os.environ.get("BIDIKV_MODEL", "smollm2"), openai_client=client)
    booking = Agent("booking", instructions="You book trips.", model=model)
    planner = Agent(
        "planner",
        instructions="You plan trips. To book one, hand over to booking.",
        tools=[weather],
        handoffs=[booking],
        model=model,
    )
    agent = planner
    async with BidiKVSession(SQLiteSession("trip"), on_exit="release") as session:
        for question in QUESTIONS:
            result = await Runner.run(agent, question, session=session, hooks=session.hooks)
            agent = result.last_agent
            cache = session.speaking.cache
            print(f"{agent.name}: {result.final_output}")
            print(f"-- {cache.outcome}: {cache.computed_tokens} tokens computed" if cache else "-- without a session")


if __name__ == "__main__":
    asyncio.run(
        run(AsyncOpenAI(base_url=os.environ["BIDIKV_BASE_URL"], api_key="none", http_client=async_http_client()))
    )
