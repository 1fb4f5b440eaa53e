"""The SDK's fake server beside the real routes: the same requests get replies of the same shape."""

import httpx
import pytest

from bidikv_sdk.testing import FakeServer

from .fakes import Script, events_of

CHAT = "/v1/chat/completions"
TURNS = "/v1/sessions/s/turns"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
CALL_TEXT = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
PROTOCOL = {"bidikv": {"protocol": 1}}

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")


def shape(value):
    """Return which fields a value has, and which of what they hold have fields; of a list all shapes that occur."""
    if isinstance(value, dict):
        # Without a session the test's engine says something to routers here, for other tests.
        return {name: ... if name == "kv_transfer_params" else shape(item) for name, item in value.items()}
    if isinstance(value, list):
        shapes = []
        for item in map(shape, value):
            if item not in shapes:
                shapes.append(item)
        return shapes
    return ...


async def talk(client, requests):
    """Send requests in turn, and return status and body, or events, of each reply."""
    replies = []
    for method, path, body in requests:
        headers = {"X-Session-ID": "s", "Idempotency-Key": "k"} if path != CHAT else {}
        reply = await client.request(method, path, json=body, headers=headers)
        if "text/event-stream" in reply.headers["content-type"]:
            replies.append((reply.status_code, [event for event in events_of(reply.text) if event != "[DONE]"]))
        else:
            replies.append((reply.status_code, reply.json()))
    return replies


def compare(stack, requests, *, fake=None, call=False):
    """Send the same requests to both, and compare the shapes of the replies."""
    server = fake or FakeServer()
    if call:
        stack.engine.script = Script(CALL_TEXT)
        server.reply(tool_calls=[CALL])
    else:
        server.reply("Hello there.")

    async def to_fake(_):
        transport = server.async_transport()
        async with httpx.AsyncClient(transport=transport, base_url="http://fake") as client:
            return await talk(client, requests)

    real = stack.run(lambda client: talk(client, requests))
    faked = stack.run(to_fake)
    assert [status for status, _ in faked] == [status for status, _ in real]
    for (_, ours), (_, theirs) in zip(faked, real, strict=True):
        assert shape(ours) == shape(theirs)


@pytest.mark.parametrize("call", [False, True])
@pytest.mark.parametrize("session", [{}, {"session_id": "s"}])
def test_a_completion(stack, session, call):
    """With a session and without, text and tool calls."""
    compare(stack, [("POST", CHAT, {"messages": HI, "tools": TOOLS, **session})], call=call)


@pytest.mark.parametrize("wants_usage", [False, True])
@pytest.mark.parametrize("session", [{}, {"session_id": "s"}])
def test_a_stream_of_a_completion(stack, session, wants_usage):
    """All chunks that occur, those with report and usage among them."""
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": wants_usage}, **session}
    compare(stack, [("POST", CHAT, body)])


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn(stack, stream):
    """Whole and streamed, and its stored reply."""
    body = {"session_id": "s", "turn": 1, "messages": HI, "stream": stream, **PROTOCOL}
    compare(stack, [("POST", TURNS, body), ("POST", TURNS, body)])


def test_control_verbs(stack):
    """Every verb, in the order of a session's life."""
    own = {"session_id": "s", **PROTOCOL}
    compare(
        stack,
        [
            ("POST", "/v1/sessions", {**own, "messages": []}),
            ("POST", TURNS, {**own, "turn": 1, "messages": HI}),
            ("GET", "/v1/sessions/s", None),
            ("GET", "/v1/sessions", None),
            ("POST", "/v1/sessions/s/extend", {**own, "ttl_s": 5}),
            ("POST", "/v1/sessions/s/fork", {**own, "child_id": "c"}),
            ("POST", "/v1/sessions/s/rewind", {**own, "turn": 0}),
            ("POST", "/v1/sessions/s/release", own),
            ("POST", "/v1/sessions/s/end", own),
        ],
    )


@pytest.mark.parametrize(
    "request_",
    [
        ("GET", "/v1/sessions/s", None),
        ("POST", TURNS, {"session_id": "s", "turn": 5, "messages": HI, **PROTOCOL}),
        ("POST", TURNS, {"session_id": "s", "turn": 1, "messages": [], **PROTOCOL}),
        ("POST", TURNS, {"session_id": "x", "turn": 1, "messages": HI, **PROTOCOL}),
        ("POST", "/v1/sessions/s/extend", {"session_id": "s", "bidikv": {"protocol": 2}}),
    ],
)
def test_refusals(stack, request_):
    """The same status, and an error with the same fields."""
    compare(stack, [request_])


def test_a_turn_that_does_not_fit(stack):
    """The conflict names the number that would."""
    own = {"session_id": "s", "messages": HI, **PROTOCOL}
    compare(stack, [("POST", TURNS, {**own, "turn": 1}), ("POST", TURNS, {**own, "turn": 7})])
