"""Sessions that branch off others, and such that end: what stock clients say of them in fields and headers."""

import pytest

from .fakes import ticket_of, turn_body
from .test_chat_route import CHAT, came, info_of, user

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

SYSTEM = {"role": "system", "content": "You are an agent with a long list of rules, of which this is one."}


async def ask(client, *messages, headers=None, **fields):
    """Send a whole history; return the reply."""
    reply = await client.post(CHAT, json={"messages": [SYSTEM, *messages], **fields}, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def sessions(client):
    """Return the ids of all sessions."""
    return sorted(one["session"] for one in (await client.get("/v1/sessions")).json()["data"])


def said(reply):
    """Return a reply's message."""
    return reply["choices"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"parent_session_id": "p"}, {}),
        ({}, {"X-Parent-Session-ID": "p"}),
        ({}, {"X-Dynamo-Parent-Session-ID": "p"}),
        ({"parent": "p"}, {"X-Dynamo-Parent-Session-ID": "other"}),
        ({}, {"X-Codex-Parent-Thread-ID": "p"}),
    ],
)
def test_an_unknown_session_begins_on_its_parents_cache(stack, fields, headers):
    """The first prompt of the child fetches all that it has in common with the parent's history."""
    stack.configure(
        parent_id_fields=("parent",),
        parent_id_headers=("X-Dynamo-Parent-Session-ID", "X-Codex-Parent-Thread-ID"),
    )

    async def scenario(client):
        first = await ask(client, user("Hi"), session_id="p")
        child = await ask(client, user("Hi"), said(first), user("And?"), session_id="c", headers=headers, **fields)
        info = info_of(child)
        assert (info.session, info.turn) == ("c", 2)
        assert came(child) == ("fetched", "cheapest")
        assert info.cache.fetched_tokens == info.cache.held_tokens == info_of(first).lease.num_tokens
        assert ticket_of(stack.p.calls[1])["remote_num_tokens"] == info.cache.fetched_tokens
        assert (await client.get("/v1/sessions/p")).json()["bidikv"]["turn"] == 1

    stack.run(scenario)


def test_a_sub_agent_shares_the_common_beginning(stack):
    """A child with another task fetches the system prompt, and says why not more."""

    async def scenario(client):
        await ask(client, user("Hi"), session_id="p")
        child = await ask(client, user("Something else."), session_id="c", parent_session_id="p")
        cache = info_of(child).cache
        assert (info_of(child).turn, cache.outcome, cache.reason) == (1, "fetched", "messages_changed")
        assert 0 < cache.fetched_tokens == cache.diverged_at < cache.held_tokens

    stack.run(scenario)


def test_a_parent_changes_nothing_for_a_session_that_is_known(stack):
    """A client names the parent in every request: only the first one forks, later ones go on."""

    async def scenario(client):
        first = await ask(client, user("Hi"), session_id="p")
        history = [user("Hi"), said(first), user("And?")]
        second = await ask(client, *history, session_id="c", parent_session_id="p")
        await ask(client, user("Else."), session_id="p")
        third = await ask(client, *history, said(second), user("So?"), session_id="c", parent_session_id="p")
        assert (info_of(third).turn, info_of(third).cache.diverged_at) == (3, None)

    stack.run(scenario)


@pytest.mark.parametrize("parent", ["unknown", "c", "x" * 300, "", 7])
def test_a_parent_that_is_none_is_no_error(stack, parent):
    """The session is then a new one."""

    async def scenario(client):
        child = await ask(client, user("Hi"), session_id="c", parent_session_id=parent)
        assert (info_of(child).turn, came(child)) == (1, ("recomputed", "first_turn"))
        assert await sessions(client) == ["c"]

    stack.run(scenario)


def test_a_numbered_turn_knows_no_parent(stack):
    """Session routes fork by their own verb: their turns number a history that the caller knows."""

    async def scenario(client):
        await ask(client, user("Hi"), session_id="p")
        turn = await client.post("/v1/sessions/c/turns", json=turn_body(1), headers={"X-Parent-Session-ID": "p"})
        assert turn.json()["bidikv"]["turn"] == 1

    stack.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("value", "state"), [("true", "released"), ("True", "released"), ("false", "active")])
def test_a_final_request_gives_the_cache_back(stack, stream, value, state):
    """With the reply the lease is gone, which the reply tells; the session is known still."""

    async def scenario(client):
        headers = {"X-Dynamo-Session-ID": "s", "X-Dynamo-Session-Final": value}
        body = {"messages": [user("Hi")], "stream": stream, "stream_options": {"include_usage": True}}
        if not stream:
            del body["stream_options"]
        reply = await client.post(CHAT, json=body, headers=headers)
        assert f'"state":"{state}"' in reply.text.replace(" ", "")
        lease = (await client.get("/v1/sessions/s")).json()["bidikv"]["lease"]
        assert (lease["state"], stack.num_pinned == 0) == (state, state == "released")

    stack.run(scenario)


def test_a_final_request_whose_release_fails_is_answered(stack):
    """The lease expires by itself then."""
    stack.engine.fail_op = "release"

    async def scenario(client):
        headers = {"X-Dynamo-Session-Final": "true"}
        reply = await ask(client, user("Hi"), session_id="s", headers=headers)
        assert info_of(reply).lease.state == "active"

    stack.run(scenario)
