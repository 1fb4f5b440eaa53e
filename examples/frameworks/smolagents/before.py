"""A smolagents agent."""

from smolagents import OpenAIModel, ToolCallingAgent, tool

from examples.frameworks.task import INSTRUCTIONS, MODEL, QUESTIONS, URL, look

model = OpenAIModel(MODEL, URL, "none")
agent = ToolCallingAgent([tool(look)], model, instructions=INSTRUCTIONS, verbosity_level=0, max_tool_threads=1)


def main() -> None:
    """Ask all questions, one after the other."""
    for question in QUESTIONS:
        print(agent.run(question, reset=False))


main()
