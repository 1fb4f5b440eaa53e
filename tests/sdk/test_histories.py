"""Forks, rewinds, replaced and resumed histories, in both flavours, against the fake server."""

import asyncio

import pytest

import bidikv_sdk

from .conftest import Awaitable

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
OTHER_TOOLS = [{"type": "function", "function": {"name": "cat", "parameters": {}}}]


def verbs(server):
    """Return the verbs of all requests so far."""
    return [request.verb for request in server.requests]


def last_turn(server):
    """Return the body of the last turn."""
    return [request.body for request in server.requests if request.verb == "turns"][-1]


def contents(session):
    """Return what was said."""
    return [message["content"] for message in session.transcript]


async def fork(session, *args, **options):
    """Fork a session, in its flavour."""
    child = await session.fork(*args, **options)
    return child if isinstance(child, bidikv_sdk.AsyncSession) else Awaitable(child)


@pytest.fixture
async def session(client):
    """A session that has completed three turns."""
    session = client.session(system="Be terse.", tools=TOOLS, temperature=0.5)
    for text in ("a", "b", "c"):
        await session.send(text)
    return session


# ---------------------------------------------------------------- forks


async def test_a_fork_shares_the_history_and_the_cache(session, server):
    """The child's first turn fetches what the parent holds, and the two go on by themselves."""
    held = session.lease.num_tokens
    async with await fork(session) as child:
        assert child.id != session.id
        assert (child.turn, child.transcript) == (3, session.transcript)
        assert (child.lease.state, child.lease.num_tokens) == ("active", held)
        turn = await child.send("d")
        assert (turn.turn, turn.cache.outcome, turn.cache.fetched_tokens) == (4, "fetched", held)
        body = last_turn(server)
        assert (body["session_id"], body["temperature"], "tools" in body) == (child.id, 0.5, False)
        assert server.messages(child.id) == child.transcript
    assert server.requests[-1].session_id == child.id
    assert contents(session) == ["Be terse.", "a", "a", "b", "b", "c", "c"]
    assert (await session.send("e")).cache.fetched_tokens == held


@pytest.mark.parametrize("at_turn", [0, 1, 2])
async def test_a_fork_of_an_earlier_turn(session, server, at_turn):
    """The child has as many turns as are asked for; from none it begins with the system prompt and the tools."""
    child = await fork(session, at_turn, ttl_s=7)
    assert child.lease.remaining_s == 7
    assert (child.turn, len(child.transcript)) == (at_turn, 1 + 2 * at_turn)
    turn = await child.send("other")
    assert (turn.turn, turn.cache.outcome) == (at_turn + 1, "fetched")
    assert server.messages(child.id) == child.transcript
    assert contents(child)[0] == "Be terse."
    assert ("tools" in last_turn(server)) == (at_turn == 0)
    assert (session.turn, server.info(session.id).turn) == (3, 3)


async def test_a_fork_has_the_tools_of_its_turn(session, server):
    """Tools that came later are not the child's."""
    await session.send("d", tools=OTHER_TOOLS)
    await (await fork(session, 3)).send("x")
    assert "tools" not in last_turn(server)
    child = await fork(session, 3)
    server.forget()
    await child.send("x")
    assert [request.body["tools"] for request in server.requests if request.verb == "open"] == [TOOLS]


async def test_many_forks_at_once(session):
    """A fan-out: each child is a session of its own."""
    children = await asyncio.gather(*(fork(session) for _ in range(8)))
    turns = await asyncio.gather(*(child.send(f"task {i}") for i, child in enumerate(children)))
    assert [turn.text for turn in turns] == [f"task {i}" for i in range(8)]
    assert {turn.cache.outcome for turn in turns} == {"fetched"}
    assert len({child.id for child in children}) == 8


async def test_a_new_session_forks_without_a_call(client, server):
    """What the server does not know yet, the child's own first turn tells it."""
    session = client.session(system="S")
    child = await fork(session)
    assert server.requests == []
    assert (await child.send("x")).turn == 1
    assert contents(child) == ["S", "x", "x"]


async def test_a_lost_parent_is_made_up_for(session, server):
    """Where the server lost the parent, or its earlier turns, the child is opened from the history here."""
    server.forget()
    child = await fork(session, 2)
    assert verbs(server)[-2:] == ["fork", "open"]
    turn = await child.send("x")
    assert (turn.turn, turn.reopened, turn.cache.reason) == (3, False, "home_lost")
    await session.send("d")  # opens the parent again, with three turns in one
    child = await fork(session, 1)
    assert verbs(server)[-2:] == ["fork", "open"]
    assert (await child.send("x")).turn == 2
    assert server.messages(child.id) == child.transcript


async def test_a_fork_whose_reply_was_lost_is_made_once(session, server):
    """A retry finds the child that the first call made."""
    server.drop(completed=True, on="fork")
    child = await fork(session)
    assert verbs(server)[-2:] == ["fork", "fork"]
    assert len(server._store.sessions) == 2  # noqa: SLF001 (no client may list them in this flavour)
    assert (await child.send("x")).turn == 4


# ---------------------------------------------------------------- rewinds


@pytest.mark.parametrize("turn", [0, 1, 2, 3])
async def test_a_rewound_session_goes_on_from_there(session, server, turn):
    """What came behind is gone, here and on the server, and the cache of what is left is used."""
    await session.rewind(turn)
    assert (session.turn, len(session.transcript)) == (turn, 1 + 2 * turn)
    assert server.info(session.id).turn == turn
    again = await session.send("other")
    assert (again.turn, again.cache.outcome) == (turn + 1, "fetched")
    assert server.messages(session.id) == session.transcript
    assert contents(session)[0] == "Be terse."


async def test_a_session_that_the_server_lost_is_rewound_too(session, server):
    """The server gets the history as it is to be."""
    server.forget()
    await session.rewind(1)
    assert verbs(server)[-2:] == ["rewind", "open"]
    assert (await session.send("x")).turn == 2
    await session.send("y")
    server.forget()
    await session.send("z")  # opened again: the server knows no earlier turns
    await session.rewind(2)
    assert (await session.send("x")).turn == 3
    assert server.messages(session.id) == session.transcript


async def test_a_new_session_is_rewound_without_a_call(client, server):
    """There is nothing to forget."""
    session = client.session(system="S")
    await session.rewind(0)
    assert server.requests == []
    assert contents(session) == ["S"]


async def test_a_turn_in_doubt_is_rewound_as_well(session, server):
    """A turn whose reply never came may be complete on the server; after a rewind it is not."""
    server.drop(completed=True)
    server.refuse()
    server.refuse()
    with pytest.raises(bidikv_sdk.APIConnectionError):
        await session.send("lost")
    assert server.info(session.id).turn == 4
    await session.rewind(3)
    assert server.info(session.id).turn == 3
    turn = await session.send("d")
    assert (turn.turn, turn.reopened) == (4, False)


@pytest.mark.parametrize("turn", [-1, 4])
async def test_turns_that_are_not_there(session, server, turn):
    """A wrong number is refused before anything is sent."""
    num_requests = len(server.requests)
    for verb in (session.fork, session.rewind):
        with pytest.raises(ValueError, match=f"there is no turn {turn} in session"):
            await verb(turn)
    assert len(server.requests) == num_requests
    assert session.turn == 3


async def test_nothing_is_forked_or_rewound_while_a_turn_runs(session):
    """One thing at a time; afterwards all works."""
    async with session.stream("d"):
        for change in (session.fork, lambda: session.rewind(1), lambda: session.replace_history([])):
            with pytest.raises(bidikv_sdk.SessionBusy):
                await change()
    await session.rewind(1)


async def test_nor_after_the_end(session):
    """An ended session has no history to go back to."""
    await session.end()
    for change in (session.fork, lambda: session.rewind(1), lambda: session.replace_history([])):
        with pytest.raises(bidikv_sdk.SessionEnded):
            await change()


async def test_a_turn_that_somebody_else_runs_is_waited_for(session, server):
    """The server's conflict is tried again, and then raised; the history here is as it was."""
    server.fail("turn_conflict", retry_after_s=0.1, on="rewind")
    await session.rewind(2)
    for _ in range(3):
        server.fail("turn_conflict", retry_after_s=0.1, on="rewind")
    with pytest.raises(bidikv_sdk.TurnConflict):
        await session.rewind(1)
    assert session.turn == 2


# ---------------------------------------------------------------- other histories


async def test_a_compacted_history_keeps_the_lease(session, server):
    """The new history replaces the old one, and the next turn uses what still matches."""
    system, *_, reply = session.transcript
    summary = {"role": "user", "content": "A summary."}
    await session.replace_history([system, summary, reply, {"role": "user", "content": "Note."}])
    assert (session.turn, session.lease.state) == (1, "active")
    turn = await session.send("d")
    assert (turn.turn, turn.cache.outcome, turn.reopened) == (2, "fetched", False)
    assert [message["content"] for message in last_turn(server)["messages"]] == ["Note.", "d"]
    assert contents(session) == ["Be terse.", "A summary.", "c", "Note.", "d", "d"]
    assert server.messages(session.id) == session.transcript
    await session.rewind(0)
    assert contents(session) == ["Be terse."]


async def test_a_history_without_replies_begins_again(session, server):
    """What is not yet answered goes with the next turn, which is the first one."""
    await session.replace_history([{"role": "user", "content": "A summary."}])
    assert (session.turn, server.info(session.id).turn) == (0, 0)
    turn = await session.send("d")
    assert (turn.turn, turn.cache.outcome) == (1, "fetched")
    assert contents(session) == ["A summary.", "d", "d"]


async def test_a_new_session_may_begin_with_a_history(client, server):
    """Without a call; its first turn finds that the server does not know it, and opens it."""
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    session = client.session(tools=TOOLS)
    await session.replace_history(history)
    history.clear()
    assert server.requests == []
    turn = await session.send("c")
    assert (turn.turn, turn.reopened, contents(session)) == (2, True, ["a", "b", "c", "c"])


async def test_a_resumed_session_goes_on_with_its_cache(session, client, server):
    """Another process needs the id and the transcript; nothing is sent before its turn."""
    num_requests = len(server.requests)
    resumed = client.resume(session.id, session.transcript, tools=TOOLS, top_p=0.5)
    assert (resumed.turn, resumed.transcript, len(server.requests)) == (3, session.transcript, num_requests)
    turn = await resumed.send("d")
    assert (turn.turn, turn.cache.outcome, turn.reopened) == (4, "fetched", False)
    assert last_turn(server)["top_p"] == 0.5
    assert server.messages(session.id) == resumed.transcript


async def test_a_resumed_session_that_is_lost_is_opened_again(session, client, server):
    """The transcript is all that is needed."""
    server.forget()
    turn = await client.resume(session.id, session.transcript).send("d")
    assert (turn.turn, turn.reopened, turn.cache.reason) == (4, True, "home_lost")


async def test_a_resumed_session_replaces_an_older_state_and_respects_a_newer_one(session, client, server):
    """A server that is behind gets the transcript; one that is ahead has somebody else's turn."""
    then = session.transcript
    await session.rewind(1)
    assert (await client.resume(session.id, then).send("d")).reopened
    with pytest.raises(bidikv_sdk.TurnConflict):
        await session.send("e")


async def test_examples_in_a_transcript_are_no_turns(client, server):
    """Where replies were given to the model, the number of turns tells which ones it made."""
    session = client.session()
    examples = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    await session.send([*examples, {"role": "user", "content": "1+2"}])
    resumed = client.resume(session.id, session.transcript, turn=1)
    assert (resumed.turn, resumed.transcript) == (1, session.transcript)
    turn = await resumed.send("2+2")
    assert (turn.turn, turn.reopened) == (2, False)
    for turn in (-1, 4):
        with pytest.raises(ValueError, match=f"turn is {turn}, but the transcript has 3 assistant messages"):
            client.resume(session.id, resumed.transcript, turn=turn)


async def test_what_is_no_message_is_refused(client, session):
    """A transcript is a list of messages."""
    with pytest.raises(TypeError, match="a history is a list of message dicts"):
        client.resume("x", ["text"])
    with pytest.raises(TypeError, match="a history is a list of message dicts"):
        await session.replace_history([7])
    assert session.turn == 3
