"""The examples of this environment, each in a process of its own, on a fake server."""

from collections.abc import Callable

from bidikv_sdk.testing import FakeServer


def test_the_stock_client(server: FakeServer, run_example: Callable[[str], str]) -> None:
    """From its second completion on it says what was there already, and at the end the session is forgotten."""
    said = run_example("examples.agents.openai_client").splitlines()
    reports = [line for line in said if line.startswith("--")]
    assert reports[0].startswith("-- recomputed: 0 of ")
    assert [report.split(":")[0] for report in reports[1:]] == ["-- fetched"] * 2
    assert server.requests[-1].verb == "end"


def test_the_hand_off(server: FakeServer, run_example: Callable[[str], str]) -> None:
    """The planner looks at the weather and hands over; each has a session, and both are given back."""
    tools = [("weather", '{"city": "Oslo"}'), ("transfer_to_booking", "{}")]
    calls = [[{"id": name, "type": "function", "function": {"name": name, "arguments": a}}] for name, a in tools]
    server.reply("Good.")
    server.reply(tool_calls=calls[0])
    server.reply("Dry.")
    server.reply(tool_calls=calls[1])
    server.reply("Booked.")
    said = [line for line in run_example("examples.agents.openai_agents_handoff").splitlines() if line[0] != "-"]
    assert said == ["planner: Good.", "planner: Dry.", "booking: Booked."]
    sessions = [request.session_id for request in server.requests if request.verb == "chat"]
    assert sessions[:4] == ["trip"] * 4
    assert str(sessions[4]).startswith("trip~")
    assert {server.info(str(session)).lease.state for session in sessions} == {"released"}
