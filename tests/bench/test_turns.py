import itertools
import json

import httpx
import pytest

from bench._turns import Recorder
from bidikv_sdk.testing import FakeServer


@pytest.fixture
def server():
    """A server without engines."""
    return FakeServer()


def record(server, *deltas):
    """Run these turns on a clock that moves on by a second whenever it is read, and return their recorder."""
    ticks = itertools.count()
    recorder = Recorder(lambda _: None, now_s=lambda: float(next(ticks)))
    with server.client() as client, client.session() as session:
        for delta in deltas:
            recorder.ask(session, delta)
    return recorder


def test_a_turn_is_measured_at_its_first_text(server):
    """Chunks without text, such as the one that names the role, are not the first token."""
    server.reply("one two three")
    (turn,) = record(server, "Hello").turns
    assert turn.ttft_s == 1.0
    assert (turn.turn, turn.text) == (1, "one two three")
    assert turn.generated_tokens > 0


def test_each_turn_is_told_as_it_ends(server):
    """Who watches sees the turns one by one."""
    seen = []
    recorder = Recorder(seen.append)
    with server.client() as client, client.session() as session:
        recorder.ask(session, "Hello")
        assert seen == recorder.turns
        recorder.ask(session, "again")
    assert seen == recorder.turns


def test_token_ids_are_asked_for_and_collected(server):
    """The ids of the prompt come with the first chunk, those of the answer with each one."""
    server.reply("a b")

    def with_ids(request):
        """Answer like the fake server, with vLLM's ids in the chunks."""
        response = httpx.Client(transport=server.transport()).send(request, stream=True)
        ids = itertools.count(7)
        events = []
        for line in response.iter_lines():
            chunk = json.loads(line[6:]) if line.startswith("data: {") else None
            if chunk and chunk["choices"] and chunk["choices"][0]["delta"].get("role"):
                chunk["prompt_token_ids"] = [1, 2, 3]
            elif chunk and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                chunk["choices"][0]["token_ids"] = [next(ids)]
            events.append(f"data: {json.dumps(chunk)}" if chunk else line)
        return httpx.Response(200, content="\n".join(events) + "\n")

    recorder = Recorder(lambda _: None)
    http_client = httpx.Client(transport=httpx.MockTransport(with_ids))
    with server.client(http_client=http_client) as client:
        recorder.ask(client.session(), "Hello")
    assert server.requests[0].body["return_token_ids"] is True
    assert recorder.turns[0].prompt_ids == [1, 2, 3]
    assert recorder.turns[0].token_ids == [7, 8]


def test_a_turn_without_text_has_no_first_token(server):
    """A turn that cannot be timed is an error, not a zero."""
    server.reply(tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}])
    with pytest.raises(ValueError, match="turn 1 has no text"):
        record(server, "Hello")


def test_turns_with_other_tokens_are_not_the_same(server):
    """Text, prompt ids and generated ids are all compared."""
    server.reply("yes")
    server.reply("no")
    server.reply("no")
    yes, no, also_no = record(server, "a", "b", "c").turns
    assert not yes.same_tokens(no)
    assert no.same_tokens(also_no)
