"""The public test double: it does what the protocol says, so that tests against it mean something."""

import httpx
import pytest

import bidikv_sdk
from bidikv_sdk.testing import FakeServer, ManualClock

pytestmark = pytest.mark.anyio


@pytest.fixture
def http(server):
    """A bare HTTP client of the server, for requests that the SDK never makes."""
    with httpx.Client(transport=server.transport(), base_url="http://fake/v1/") as client:
        yield client


def body(turn=1, **more):
    """Build a turn's body."""
    return {
        "session_id": "s",
        "turn": turn,
        "messages": [{"role": "user", "content": "x"}],
        "bidikv": {"protocol": 1},
        **more,
    }


def post(http, path="sessions/s/turns", key="k", headers=None, **more):
    """Post and return the status and the error's code or the reply."""
    head = {"X-Session-ID": "s", "Idempotency-Key": key, **(headers or {})}
    reply = http.post(path, json=body(**more), headers=head)
    data = reply.json()
    return reply.status_code, data["error"]["code"] if "error" in data else data


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        ({"headers": {"X-Session-ID": "t"}}, (400, "invalid_request")),
        ({"session_id": "t"}, (400, "invalid_request")),
        ({"bidikv": {"protocol": 2}}, (400, "protocol_mismatch")),
        ({"bidikv": {}}, (400, "protocol_mismatch")),
        ({"messages": []}, (400, "invalid_request")),
        ({"turn": "1"}, (400, "invalid_request")),
        ({"cache_salt": "x"}, (400, "unsupported_parameter")),
        ({"turn": 2}, (404, "session_not_found")),
    ],
)
def test_wrong_requests_are_refused(http, request_, answer):
    """What a real server refuses about ids, versions, numbers and parameters is refused here too."""
    assert post(http, **request_) == answer


@pytest.mark.parametrize("path", ["sessions/s/fly", "models"])
def test_other_routes_do_not_exist(http, path):
    """Any other path is answered as by a server that has no such route."""
    assert post(http, path=path) == (404, {"detail": "Not Found"})


def test_turn_numbers_and_keys_follow_the_protocol(http):
    """The last number with its key returns the stored reply; with another key, or another number, it conflicts."""
    status, first = post(http)
    assert status == 200
    assert post(http) == (200, first)
    assert post(http, key="other") == (409, "turn_conflict")
    assert post(http, turn=3) == (409, "turn_conflict")
    assert post(http, turn=2)[0] == 200


def test_opening_follows_the_protocol(http, server):
    """The same turn returns the session, another one conflicts unless it replaces; unknown history is home_lost."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert post(http, "sessions", turn=1, messages=messages)[0] == 200
    assert post(http, "sessions", turn=1, messages=[])[1]["bidikv"]["turn"] == 1
    assert server.messages("s") == messages
    assert post(http, "sessions", turn=4, messages=messages) == (409, "turn_conflict")
    assert post(http, "sessions", turn=4, messages=messages, replace=True)[1]["bidikv"]["turn"] == 4
    assert post(http, turn=5)[1]["bidikv"]["cache"]["reason"] == "home_lost"


def test_delete_ends_like_post(http, server):
    """Both ways of ending forget the session."""
    post(http)
    assert http.delete("sessions/s", headers={"X-Session-ID": "s"}).status_code == 200
    with pytest.raises(KeyError):
        server.info("s")


async def test_a_stream_that_is_open_is_a_running_turn(client):
    """A second turn meets a conflict that says when to come back, and the SDK's wait is the clock's."""
    session, other = client.session("s"), client.session("s")
    async with session.stream("one two") as stream:
        with pytest.raises(bidikv_sdk.TurnConflict) as caught:
            await other.send("x")
        await stream.final_turn()
    assert caught.value.retry_after_s == 0.5


@pytest.mark.parametrize(
    ("outcome", "route"),
    [
        ("fetched", None),
        ("local", "local"),
        ("prefilled", "prefill"),
        ("recomputed", "recompute"),
        ("fetched", "fetch"),
    ],
)
async def test_routes_and_scripts_shape_the_report(client, server, outcome, route):
    """A forced route gives its outcome, and the three token counts always add up to the prompt."""
    session = client.session()
    await session.send("one two three")
    cache = (await session.send("four", route=route)).cache
    assert (cache.outcome, cache.reason) == (outcome, "forced" if route else "cheapest")
    assert cache.reused_tokens + cache.fetched_tokens + cache.computed_tokens == cache.prompt_tokens
    server.reply("x", outcome="local", reason="below_threshold", finish_reason="length")
    turn = await session.send("five")
    assert (turn.cache.outcome, turn.cache.reason, turn.finish_reason) == ("local", "below_threshold", "length")


def test_nothing_is_shared_between_servers():
    """Two servers know nothing of each other."""
    one, two = FakeServer(), FakeServer(model="other", ttl_s=5)
    with one.client() as client:
        client.session("s").send("x")
    with two.client() as client:
        assert client.sessions() == []
        turn = client.session("s").send("x")
    assert turn.completion["model"] == "other"
    assert turn.lease.remaining_s == 5


async def test_the_manual_clock_sleeps_in_no_time():
    """Sleeping moves the clock at once, and is recorded."""
    clock = ManualClock()
    clock.sleep(3)
    await clock.sleep_async(4)
    assert (clock.now_s(), clock.slept_s) == (7.0, [3, 4])


def test_who_looks_sees_what_the_last_turn_did(server):
    """The double tells of the last turn where a real server does: in the replies to get and list."""
    with server.client() as client, client.session() as session:
        turn = session.send("Hi")
        assert session.status().last_turn == turn.cache
        assert [info.last_turn for info in client.sessions()] == [turn.cache]
        assert session.release().last_turn is None
