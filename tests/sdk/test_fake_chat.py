"""The fake server's chat route: any OpenAI client, with its whole history, within a session and without."""

import json
import threading

import httpx
import httpx2
import pytest

from bidikv_sdk.testing import FakeServer
from bidikv_sdk.wire import SessionInfo

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


@pytest.fixture(params=["httpx", "httpx2", "socket"])
def http(request, server):
    """A client of the server, over each of the ways to reach it."""
    module = httpx if request.param == "httpx" else httpx2
    if request.param != "socket":
        with module.Client(transport=server.transport(module), base_url="http://fake/v1/") as client:
            yield client
        return
    with server.serve() as base_url, module.Client(base_url=base_url + "/") as client:
        yield client


def user(text):
    """Return a user's message."""
    return {"role": "user", "content": text}


def chat(http, *messages, headers=None, **fields):
    """Send a whole history; return the reply as JSON."""
    reply = http.post("chat/completions", json={"messages": list(messages), **fields}, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def said(reply):
    """Return a reply's message."""
    return reply["choices"][0]["message"]


def told(reply):
    """Return outcome, reason, fetched and held tokens, and the turn."""
    info = SessionInfo.from_json(reply["bidikv"])
    cache = info.cache
    assert cache.reused_tokens + cache.fetched_tokens + cache.computed_tokens == cache.prompt_tokens
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cache.reused_tokens + cache.fetched_tokens
    return cache.outcome, cache.reason, cache.fetched_tokens, cache.held_tokens, info.turn


def test_without_a_session_nothing_is_kept(http, server):
    """The answer is an ordinary one."""
    reply = chat(http, user("a b"))
    assert "bidikv" not in reply
    assert (said(reply)["content"], reply["usage"]["prompt_tokens"]) == ("a b", 3)
    assert http.get("sessions").json()["data"] == []
    assert server.requests[0].verb == "chat"


def test_a_whole_history_goes_on(http):
    """All that the session holds is fetched, whatever empty fields and ways of writing arguments do to its messages."""
    first = chat(http, user("a b"), session_id="s")
    assert told(first) == ("recomputed", "first_turn", 0, 0, 1)
    second = chat(http, user("a b"), said(first), user("c"), session_id="s")
    assert told(second) == ("fetched", "cheapest", 6, 6, 2)
    third = chat(
        http, user("a b"), {"role": "assistant", "content": "a b"}, user("c"), said(second), user("d"), session_id="s"
    )
    assert told(third) == ("fetched", "cheapest", 10, 10, 3)


def test_a_tool_call_comes_back_written_in_another_way(http, server):
    """The arguments count, not their spaces."""
    server.reply(tool_calls=[CALL])
    first = chat(http, user("a"), session_id="s")
    assert (first["choices"][0]["finish_reason"], said(first)["content"]) == ("tool_calls", None)
    call = {**CALL, "function": {"name": "look", "arguments": '{"at":1}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "wall"}
    again = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert told(chat(http, user("a"), again, result, session_id="s"))[:3] == ("fetched", "cheapest", 3)


@pytest.mark.parametrize(
    ("messages", "fields", "expected"),
    [
        ([user("a"), user("c")], {}, ("fetched", "messages_changed", 5, 11, 1)),
        ([user("a"), {"role": "assistant", "content": "z"}, user("c")], {}, ("fetched", "messages_changed", 5, 11, 1)),
        ([user("a")], {}, ("fetched", "messages_changed", 5, 11, 1)),
        ([user("a")], {"system": "other"}, ("recomputed", "system_changed", 0, 11, 1)),
        ([user("a")], {"tools": [{"type": "function"}]}, ("recomputed", "tools_changed", 0, 11, 1)),
    ],
)
def test_an_edited_history_keeps_the_common_beginning(http, messages, fields, expected):
    """And says why it is not more; what was held behind it is replaced."""
    system = {"role": "system", "content": "be terse"}
    first = chat(http, system, user("a"), session_id="s")
    chat(http, system, user("a"), said(first), user("b"), session_id="s")
    tools = {name: value for name, value in fields.items() if name == "tools"}
    system = {**system, "content": fields.get("system", "be terse")}
    reply = chat(http, system, *messages, session_id="s", **tools)
    assert told(reply) == expected
    diverged_at = reply["bidikv"]["cache"]["diverged_at"]
    assert diverged_at == expected[2]


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"session_id": "s"}, {}),
        ({}, {"X-Session-ID": "s"}),
        ({"vllm_xargs": {"session_id": "s"}}, {}),
        ({"session_id": "s"}, {"X-Session-ID": "other"}),
    ],
)
def test_a_session_is_named_as_with_the_real_one(http, fields, headers):
    """In body, header or extra arguments, in this order."""
    assert chat(http, user("a"), headers=headers, **fields)["bidikv"]["session"] == "s"


def test_an_unknown_session_is_forked_from_its_parent(http, server):
    """It begins on the parent's cache, and the parent stays as it is."""
    first = chat(http, user("a b"), session_id="p")
    headers = {"X-Parent-Session-ID": "p"}
    child = chat(http, user("a b"), said(first), user("c"), session_id="c", headers=headers)
    assert told(child) == ("fetched", "cheapest", 6, 6, 2)
    assert server.info("p").turn == 1
    assert told(chat(http, user("x"), session_id="d", parent_session_id="unknown"))[1] == "first_turn"


@pytest.mark.parametrize("fields", [{"n": 2}, {"echo": True}, {"cache_salt": "x"}])
def test_what_a_session_cannot_serve_is_served_without(http, fields):
    """Naming a session makes no request fail."""
    assert "bidikv" not in chat(http, user("a"), session_id="s", **fields)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    assert "bidikv" not in chat(http, image, session_id="s")
    text = {"role": "user", "content": [{"type": "text", "text": "a b"}]}
    assert said(chat(http, text, session_id="s"))["content"] == "a b"


@pytest.mark.parametrize("wants_usage", [False, True])
@pytest.mark.parametrize("session", [{}, {"session_id": "s"}])
def test_a_stream_says_the_same(http, server, wants_usage, session):
    """Words, calls and thoughts in pieces; report and usage where the real server puts them."""
    server.reply("a b", tool_calls=[CALL], reasoning="so so")
    body = {"messages": [user("x")], "stream": True, "stream_options": {"include_usage": wants_usage}, **session}
    with http.stream("POST", "chat/completions", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "a b"
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "so so"
    parts = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(parts) == CALL["function"]["arguments"]
    assert ["bidikv" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [bool(session)]
    assert (chunks[-1]["choices"] == []) == ("usage" in chunks[-1]) == wants_usage
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "tool_calls"


def test_leases_follow_the_clock(http, server):
    """An expired lease has nothing to fetch, and says why."""
    first = chat(http, user("a"), session_id="s")
    server.advance(61)
    history = (user("a"), said(first), user("b"))
    assert told(chat(http, *history, session_id="s"))[:4] == ("recomputed", "lease_expired", 0, 0)
    control = {"session_id": "s", "bidikv": {"protocol": 1}}
    released = http.post("sessions/s/release", json=control, headers={"X-Session-ID": "s"})
    assert released.json()["bidikv"]["lease"]["state"] == "released"


def test_outcomes_can_be_scripted(http, server):
    """What the report says is the test's to choose, with counts that fit."""
    chat(http, user("a"), session_id="s")
    server.reply("x", outcome="recomputed", reason="prefill_unavailable")
    reply = chat(http, user("a"), {"role": "assistant", "content": "a"}, user("b"), session_id="s")
    assert told(reply) == ("recomputed", "prefill_unavailable", 0, 4, 2)


def test_faults_reach_completions(http, server):
    """Errors and broken connections, before the reply and inside a stream; the session is then as before."""
    server.fail("engine_unavailable", on="chat")
    assert http.post("chat/completions", json={"messages": [user("a")], "session_id": "s"}).status_code == 503
    server.drop(on="chat")
    with pytest.raises((httpx.TransportError, httpx2.TransportError)):
        chat(http, user("a"), session_id="s")
    server.drop(on="chat", after_chunks=1)
    body = {"messages": [user("a")], "session_id": "s", "stream": True}
    with pytest.raises((httpx.TransportError, httpx2.TransportError)):
        http.post("chat/completions", json=body)
    assert server.info("s").turn == 0
    assert http.post("chat/completions", json={"messages": []}).status_code == 400
    assert told(chat(http, user("a"), session_id="s"))[-1] == 1


def test_keys_and_models(server):
    """A key that is asked for is asked for here too; the model can be listed."""
    server = FakeServer(api_key="k", model="m")
    with server.serve() as base_url:
        assert httpx.get(f"{base_url}/models").status_code == 401
        models = httpx.get(f"{base_url}/models", headers={"Authorization": "Bearer k"}).json()
        assert [model["id"] for model in models["data"]] == ["m"]
        assert httpx.get(f"{base_url}/other").status_code == 404


def test_many_connections_at_a_time(server):
    """Requests of several threads do not get in each other's way."""
    with server.serve() as base_url:

        def run(name):
            history = []
            with httpx.Client(base_url=base_url + "/") as http:
                for _ in range(5):
                    history.append(user(name))
                    history.append(said(chat(http, *history, session_id=name)))

        threads = [threading.Thread(target=run, args=(f"s{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {server.info(f"s{i}").turn for i in range(8)} == {5}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{base_url}/models")
