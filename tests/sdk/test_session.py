"""A session's turns and control verbs, in both flavours, against the fake server."""

import json
import logging

import httpx
import pytest

import bidikv_sdk

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/"}'}}


def verbs(server):
    """Return the verbs of all requests so far."""
    return [request.verb for request in server.requests]


def turns(server):
    """Return the bodies of the turns so far."""
    return [request.body for request in server.requests if request.verb == "turns"]


async def test_a_turn_sends_the_delta_and_returns_what_came_of_it(client, server):
    """Only the new messages travel; text, lease, cache report, pool and request id come back."""
    server.reply("Hello!")
    async with client.session("s1", system="Be terse.") as session:
        turn = await session.send("Hi", temperature=0.5)
        assert (turn.turn, turn.text, turn.tool_calls, turn.finish_reason) == (1, "Hello!", [], "stop")
        assert turn.lease.state == "active"
        assert session.lease == turn.lease
        assert (turn.cache.outcome, turn.cache.reason) == ("recomputed", "first_turn")
        assert turn.pool.total_blocks == 1024
        assert turn.completion["object"] == "chat.completion"
        assert turn.request_id == server.requests[0].headers["x-request-id"]
        assert turn.raw_headers["content-type"] == "application/json"
        assert not turn.reopened
        second = await session.send({"role": "user", "content": "Again"})
        assert (second.cache.outcome, second.cache.reason) == ("fetched", "cheapest")
    first, other = turns(server)
    assert first["messages"] == [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "Hi"},
    ]
    assert first["temperature"] == 0.5
    assert first["bidikv"] == {"protocol": 1}
    assert other["messages"] == [{"role": "user", "content": "Again"}]
    assert "temperature" not in other


async def test_every_call_carries_the_id_in_header_and_body(client, server):
    """Routers hash the two apart, so both are always there (a GET has no body)."""
    async with client.session("a b?c%2Fd#e") as session:
        await session.send("Hi")
        await session.extend()
        await session.release()
        await session.status()
    assert verbs(server) == ["turns", "extend", "release", "get", "end"]
    for request in server.requests:
        assert request.headers["x-session-id"] == request.session_id == session.id
        assert request.body.get("session_id", session.id) == session.id


async def test_the_transcript_grows_with_completed_turns_only(client, server):
    """The transcript has the system prompt, the deltas and the replies; a failed turn leaves no trace."""
    session = client.session(system="S")
    assert session.transcript == [{"role": "system", "content": "S"}]
    assert (session.turn, session.lease) == (0, None)
    server.reply(tool_calls=[CALL])
    turn = await session.send("List /")
    assert turn.tool_calls == [CALL]
    assert (turn.text, turn.finish_reason) == ("", "tool_calls")
    server.fail("invalid_request")
    with pytest.raises(bidikv_sdk.BadRequestError):
        await session.send("nonsense")
    await session.send([{"role": "tool", "tool_call_id": "c1", "content": "bin etc"}])
    assert session.turn == 2
    assert session.transcript == server.messages(session.id)
    assert [message["role"] for message in session.transcript] == [
        "system", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    session.transcript.clear()
    turn.message.clear()
    assert len(session.transcript) == 5


async def test_tools_travel_once_and_again_when_they_change(client, server):
    """The server keeps the tools, so they are sent at first and on change, and are part of a re-opening."""
    session = client.session(tools=TOOLS)
    await session.send("1")
    await session.send("2")
    await session.send("3", tools=[])
    await session.send("4")
    assert [body.get("tools") for body in turns(server)] == [TOOLS, None, [], None]
    server.forget()
    await session.send("5")
    assert server.requests[-2].body["tools"] == []


async def test_defaults_of_client_session_and_call_override_in_that_order(make_client, server):
    """A call's parameter beats the session's, which beats the client's."""
    client = make_client(server, model="m0")
    session = client.session(model="m1", route="local", ttl_s=10, temperature=0.1, top_p=0.9)
    await session.send("1")
    await session.send("2", route="prefill", ttl_s=20, temperature=0.2, model="m2", top_p=None)
    await client.session().send("3")
    first, second, third = turns(server)
    assert (first["model"], first["temperature"], first["top_p"]) == ("m1", 0.1, 0.9)
    assert first["bidikv"] == {"protocol": 1, "route": "local", "ttl_s": 10}
    assert (second["model"], second["temperature"]) == ("m2", 0.2)
    assert "top_p" not in second
    assert second["bidikv"] == {"protocol": 1, "route": "prefill", "ttl_s": 20}
    assert third["model"] == "m0"


@pytest.mark.parametrize(
    ("delta", "options", "error", "message"),
    [
        (7, {}, TypeError, "a delta is a str, a message dict or a list of them, got int"),
        ([1], {}, TypeError, "got list"),
        ([], {}, ValueError, "at least one message"),
        ("x", {"route": "warp"}, ValueError, "route must be one of auto, fetch"),
        ("x", {"messages": []}, TypeError, "the SDK sets 'messages' itself"),
        ("x", {"stream": True}, TypeError, r"use session\.stream\(\)"),
        ("x", {"temperature": float("nan")}, ValueError, "not JSON compliant"),
    ],
)
async def test_wrong_arguments_are_refused_before_anything_is_sent(client, server, delta, options, error, message):
    """A wrong argument is a TypeError or ValueError that names it, and the session goes on."""
    session = client.session()
    with pytest.raises(error, match=message):
        await session.send(delta, **options)
    assert server.requests == []
    assert (await session.send("fine")).turn == 1


@pytest.mark.parametrize("session_id", ["", ".", "..", "ü", "a\nb", " a", "a/b", "x" * 257])
async def test_ids_that_cannot_travel_are_refused(client, session_id):
    """An id must fit in a header and in a path."""
    with pytest.raises(ValueError, match="session id"):
        client.session(session_id)


async def test_minted_ids_are_long_and_different(client):
    """128 random bits make 22 url-safe characters."""
    ids = {client.session().id for _ in range(100)}
    assert len(ids) == 100
    assert {len(each) for each in ids} == {22}


async def test_extend_never_shortens_and_uses_the_session_s_ttl(client, server):
    """Extending asks for the session's TTL by default, and a shorter wish leaves the lease as it is."""
    session = client.session(ttl_s=30)
    await session.send("Hi")
    server.advance(20)
    assert (await session.status()).lease.remaining_s == pytest.approx(10)
    assert (await session.extend()).remaining_s == pytest.approx(30)
    assert (await session.extend(5)).remaining_s == pytest.approx(30)
    assert (await session.extend(100)).remaining_s == pytest.approx(100)
    assert session.lease.remaining_s == pytest.approx(100)


async def test_a_lost_lease_is_an_error_of_extend_only(client, server):
    """Extending an expired lease raises with the reason; the next turn works and says why it computed again."""
    session = client.session()
    await session.send("Hi")
    server.advance(61)
    with pytest.raises(bidikv_sdk.LeaseLost, match="expired") as caught:
        await session.extend()
    assert caught.value.reason == "lease_expired"
    assert (await session.send("On")).cache.reason == "lease_expired"
    server.revoke(session.id, "over_budget")
    assert (await session.send("On")).cache.reason == "over_budget"


async def test_release_gives_the_cache_back_and_keeps_the_session(client):
    """After a release the next turn computes its prompt again."""
    session = client.session()
    await session.send("Hi")
    assert (await session.release()).lease.state == "released"
    turn = await session.send("On")
    assert (turn.turn, turn.cache.reason) == (2, "released")


async def test_a_late_control_reply_does_not_overwrite_a_newer_lease(client, server):
    """A renewal that was overtaken by a turn leaves the turn's lease in place."""
    session = client.session()
    await session.send("1")
    old = server.info(session.id).to_json()
    await session.send("2")
    newest = session.lease
    server.respond(200, {"bidikv": old}, on="get")
    assert (await session.status()).turn == 1
    assert session.lease == newest


async def test_the_block_ends_the_session_once(client, server):
    """Leaving the block ends the session; ending by hand before is no second request."""
    async with client.session() as session:
        await session.send("Hi")
        await session.end()
    assert verbs(server) == ["turns", "end"]
    with pytest.raises(bidikv_sdk.SessionEnded, match="was ended"):
        await session.send("Hi")
    with pytest.raises(bidikv_sdk.SessionEnded):
        await session.extend()
    with pytest.raises(bidikv_sdk.SessionEnded):
        await session.status()


async def test_ending_an_unknown_session_is_fine(client):
    """A server that does not know the session has nothing left to do."""
    async with client.session() as session:
        pass
    await session.end()


async def test_a_failed_end_can_be_tried_again(make_client, server):
    """`end` raises what went wrong, and a second call asks again."""
    session = make_client(server, max_retries=0).session()
    await session.send("Hi")
    server.refuse(on="end")
    with pytest.raises(bidikv_sdk.APIConnectionError):
        await session.end()
    await session.end()
    assert verbs(server) == ["turns", "end", "end"]


@pytest.mark.parametrize("trouble", ["refused", "closed"])
async def test_leaving_the_block_never_masks_the_body_s_exception(make_client, server, trouble, caplog):
    """Trouble while ending is logged; the exception of the body comes out."""
    client = make_client(server, max_retries=0)
    if trouble == "refused":
        server.refuse(on="end")
    with pytest.raises(KeyError, match="the body"):  # noqa: PT012 - the block is what is tested
        async with client.session():
            if trouble == "closed":
                await client.close()
            raise KeyError("the body")  # noqa: EM101
    assert "was not ended" in caplog.text


# ---------------------------------------------------------------- re-opening


async def test_a_lost_session_is_opened_again_by_the_next_turn(client, server, caplog):
    """The server forgot: the SDK re-opens with the full history, sends the delta, and says so."""
    caplog.set_level(logging.INFO, logger="bidikv")
    session = client.session(system="S", tools=TOOLS)
    await session.send("one")
    history = session.transcript
    server.forget()
    turn = await session.send("two")
    assert turn.reopened
    assert (turn.turn, turn.text, turn.cache.reason) == (2, "two", "home_lost")
    assert verbs(server) == ["turns", "turns", "open", "turns"]
    opened = server.requests[2].body
    assert (opened["messages"], opened["tools"], opened["turn"]) == (history, TOOLS, 1)
    assert not opened["replace"]
    assert server.messages(session.id) == session.transcript
    assert "opening it again from its 1 turns" in caplog.text
    assert not (await session.send("three")).reopened


async def test_a_first_turn_that_is_not_found_is_not_opened_again(client, server):
    """There is no history to open from, so the error is the caller's."""
    server.fail("session_not_found")
    with pytest.raises(bidikv_sdk.SessionNotFound):
        await client.session().send("Hi")


async def test_a_turn_that_only_the_server_completed_is_replaced(client, server):
    """The reply was lost but the turn was appended: the next send swaps the server's transcript for ours."""
    session = client.session()
    await session.send("one")
    server.drop(completed=True, after_chunks=2)
    async with session.stream("two") as stream:
        with pytest.raises(bidikv_sdk.StreamInterrupted):
            await stream.final_turn()
    assert (server.info(session.id).turn, session.turn) == (2, 1)
    server.respond(400, {}, on="turns")  # a refused turn does not settle the doubt
    with pytest.raises(bidikv_sdk.BadRequestError):
        await session.send("nonsense")
    turn = await session.send("other")
    assert (turn.turn, turn.reopened) == (2, True)
    assert server.requests[-2].body["replace"] is True
    assert server.messages(session.id) == session.transcript


async def test_an_older_copy_on_the_server_is_replaced(client, server):
    """A server that knows fewer turns (a router moved the session) gets the full history."""
    session = client.session()
    for text in "ab":
        await session.send(text)
    server.fail("turn_conflict", expected_turn=2, on="turns")
    turn = await session.send("c")
    assert (turn.turn, turn.reopened) == (3, True)
    assert server.messages(session.id) == session.transcript


async def test_somebody_else_s_turn_is_never_overwritten(client, server):
    """A server that is ahead without reason here means a second writer: the conflict is the caller's."""
    first, second = client.session("shared"), client.session("shared")
    await first.send("one")
    with pytest.raises(bidikv_sdk.TurnConflict) as caught:
        await second.send("two")
    assert caught.value.expected_turn == 2
    assert verbs(server) == ["turns", "turns"]
    server.fail("turn_conflict")
    with pytest.raises(bidikv_sdk.TurnConflict):
        await first.send("two")


# ---------------------------------------------------------------- broken replies


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<html>", "not JSON"),
        ("[]", "not a JSON object but list"),
        ("{}", r"choices\[0\]\.message is missing"),
        (json.dumps({"choices": [{"message": {"content": "x"}}]}), "bidikv must be a JSON object, got None"),
    ],
)
async def test_a_reply_that_breaks_the_protocol_is_named(client, server, body, message):
    """An unreadable reply is an InvalidResponse with the body; the turn is not in the transcript."""
    session = client.session()
    server.respond(200, body, {"X-Request-Id": "r1"})
    with pytest.raises(bidikv_sdk.InvalidResponse, match=message) as caught:
        await session.send("Hi")
    assert caught.value.request_id == "r1"
    assert caught.value.body is not None
    assert session.turn == 0
    assert (await session.send("Hi")).turn == 1


async def test_a_turn_without_a_cache_report_breaks_the_protocol(client, server):
    """Every turn must say where its cache came from."""
    other = client.session("other")
    await other.send("x")
    info = server.info("other").to_json()
    server.respond(200, {"choices": [{"message": {"content": "x"}}], "bidikv": info})
    with pytest.raises(bidikv_sdk.InvalidResponse, match="cache is null"):
        await client.session().send("Hi")


async def test_to_openai_returns_openai_s_own_object(client, server):
    """Where the openai package is installed, the completion is its ChatCompletion."""
    from openai.types import chat

    server.reply(tool_calls=[CALL])
    completion = (await client.session().send("Hi")).to_openai()
    assert isinstance(completion, chat.ChatCompletion)
    assert completion.choices[0].message.tool_calls[0].function.name == "ls"


async def test_to_openai_names_the_missing_package(client, monkeypatch):
    """Without the openai package the error says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "openai.types.chat", None)
    turn = await client.session().send("Hi")
    with pytest.raises(ImportError, match="pip install openai"):
        turn.to_openai()


async def test_a_second_turn_at_the_same_time_is_refused(client, server):
    """A session runs one turn at a time; the running one is not disturbed."""
    session = client.session()
    async with session.stream("one two") as stream:
        with pytest.raises(bidikv_sdk.SessionBusy, match="is running"):
            await session.send("three")
        turn = await stream.final_turn()
    assert turn.text == "one two"
    assert (await session.send("four")).turn == 2
    assert len(turns(server)) == 2


async def test_the_sessions_of_the_caller_are_listed(client):
    """The list has one entry per session, without cache reports."""
    for name in ("a", "b"):
        await client.session(name).send("Hi")
    found = await client.sessions()
    assert [(info.session, info.turn, info.cache) for info in found] == [("a", 1, None), ("b", 1, None)]


async def test_a_broken_list_is_named(client, server):
    """A list that is none breaks the protocol."""
    server.respond(200, {"data": None})
    with pytest.raises(bidikv_sdk.InvalidResponse, match=r"sessions\.data"):
        await client.sessions()


async def test_repr_shows_id_and_turn_and_no_text(client):
    """Sessions end up in logs: they show no prompt."""
    session = client.session("s1", system="secret")
    await session.send("secret")
    assert "s1 turn=1>" in repr(getattr(session, "value", session))


async def test_per_call_timeout_reaches_the_transport(flavour, make_client, server):
    """The timeout of a call beats the client's; connecting is bounded by five seconds."""
    seen = []

    def note(request):
        seen.append(request.extensions["timeout"])

    async def note_async(request):
        note(request)

    if flavour == "sync":
        http_client = httpx.Client(transport=server.transport(), event_hooks={"request": [note]})
    else:
        http_client = httpx.AsyncClient(transport=server.async_transport(), event_hooks={"request": [note_async]})
    session = make_client(server, http_client=http_client, timeout=None).session()
    await session.send("a", timeout=2)
    await session.send("b")
    assert [(each["read"], each["connect"]) for each in seen] == [(2, 2), (None, 5)]
