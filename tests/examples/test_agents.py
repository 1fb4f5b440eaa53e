"""The examples that need nothing but the SDK, each on a fake server; the frameworks' are in `tests/integrations`."""

import json
from pathlib import Path
from typing import Any

import pytest

from bidikv_sdk.testing import FakeServer
from examples.agents import fan_out, leases, plain_loop

AGENTS = Path(plain_loop.__file__).parent


@pytest.fixture
def anyio_backend() -> str:
    """The SDK's background task is asyncio's."""
    return "asyncio"


@pytest.mark.parametrize("path", sorted(AGENTS.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    """A reader sees all of it at once."""
    assert len(path.read_text("utf-8").splitlines()) < 60


def call(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    """Return a tool call."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def test_the_plain_loop(tmp_path: Path) -> None:
    """It runs every tool that the model asks for, sends only their results, and tells the model what went wrong."""
    (tmp_path / "notes.txt").write_text("Buy milk.")
    server = FakeServer()
    wanted = [
        call("list_files", "1", path=str(tmp_path)),
        call("read_file", "2", path=str(tmp_path / "notes.txt")),
        call("read_file", "3", path=str(tmp_path / "none.txt")),
        call("delete_file", "4", path=str(tmp_path)),
    ]
    server.reply(tool_calls=wanted)
    server.reply("Milk.")
    with server.client() as client, client.session(tools=plain_loop.DEFINITIONS) as session:
        turn = plain_loop.answer(session, "What am I to buy?")
    assert (turn.text, turn.cache.outcome) == ("Milk.", "fetched")
    question, results = (request.body["messages"] for request in server.requests if request.verb == "turns")
    assert [message["role"] for message in question] == ["user"]
    said = {message["tool_call_id"]: message["content"] for message in results}
    assert (said["1"], said["2"]) == ("notes.txt", "Buy milk.")
    assert said["3"].startswith("FileNotFoundError")
    assert said["4"].startswith("KeyError")


@pytest.mark.anyio
async def test_the_fan_out() -> None:
    """Every reviewer begins on what the reader has read, and the reader goes on as if nobody else had."""
    server = FakeServer()
    async with server.async_client() as client:
        reviews, verdict = await fan_out.run(client, "word " * 500)
    assert len(reviews) == len(fan_out.LOOKS)
    for turn in reviews:
        assert turn.cache.outcome == "fetched"
        assert turn.cache.fetched_tokens == turn.cache.held_tokens > 500
    assert verdict.turn == 2
    assert verdict.cache.fetched_tokens == verdict.cache.held_tokens
    assert [request.verb for request in server.requests].count("fork") == len(fan_out.LOOKS)


def test_the_leases(capsys: pytest.CaptureFixture[str]) -> None:
    """It extends, lists, releases, survives a lease that is gone, and goes on in both conversations."""
    server = FakeServer()
    with server.client() as client:
        leases.run(client)
    asked, *listed, released, too_late, short, long = capsys.readouterr().out.splitlines()
    assert asked == "asked for 600 s, got 600 s"
    assert [line.split(": ")[1].split(",")[0] for line in listed] == ["active", "active"]
    assert "released, 0 s left, 0 blocks" in released
    assert too_late == "too late, it is gone (released): the next turn computes its prompt again"
    assert short.startswith("recomputed (released)")
    assert long.startswith("fetched")
