"""A Pydantic AI agent."""

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from examples.frameworks.task import INSTRUCTIONS, MODEL, QUESTIONS, URL, look

client = AsyncOpenAI(base_url=URL, api_key="none")
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
agent = Agent(model, system_prompt=INSTRUCTIONS, tools=[look])


def main() -> None:
    """Ask all questions, one after the other."""
    history = None
    for question in QUESTIONS:
        result = agent.run_sync(question, message_history=history)
        history = result.all_messages()
        print(result.output)


main()
