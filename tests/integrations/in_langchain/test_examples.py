"""The examples of this environment, each in a process of its own, on a fake server."""

from collections.abc import Callable

from bidikv_sdk.testing import FakeServer


def test_the_agent(server: FakeServer, run_example: Callable[[str], str]) -> None:
    """It looks before it answers, and its thread is given back at the end."""
    for city in ("Paris", "Oslo"):
        function = {"name": "look", "arguments": f'{{"city": "{city}"}}'}
        server.reply(tool_calls=[{"id": f"call-{city}", "type": "function", "function": function}])
        server.reply(f"I saw {city}.")
    said = run_example("examples.agents.langchain_agent").splitlines()
    assert [said[0], said[2]] == ["I saw Paris.", "I saw Oslo."]
    assert all(line.startswith("-- fetched") for line in (said[1], said[3]))
    assert server.info("weather").turn == 4
    assert server.requests[-1].verb == "release"


def test_the_time_travel(server: FakeServer, run_example: Callable[[str], str]) -> None:
    """The other future is a branch from the second turn, the thread goes on there, and the first is still held."""
    said = run_example("examples.agents.langgraph_time_travel").splitlines()
    heads = [line.split("]")[0][1:] for line in said if line.startswith("[")]
    branch = heads[3].split(",")[0]
    assert branch.startswith("story~")
    expected = ["story, turn 1", "story, turn 2", "story, turn 3", f"{branch}, turn 3", f"{branch}, turn 4"]
    assert heads == expected
    assert {server.info(name).lease.state for name in ("story", branch)} == {"active"}
