"""What is tried again, what is not, and how long the SDK waits."""

import datetime as dt
from email.utils import format_datetime

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bidikv_sdk
from bidikv_sdk._requests import error_of
from bidikv_sdk._retry import delay_s, is_retryable

pytestmark = pytest.mark.anyio


def keys(server):
    """Return the idempotency keys of the turns so far."""
    return [request.headers["idempotency-key"] for request in server.requests if request.verb == "turns"]


@given(st.integers(1, 50), st.floats(0, 1, exclude_max=True))
def test_backoff_doubles_from_half_a_second_to_eight(num_failures, random_unit):
    """The wait is at most the doubled one, at least three quarters of it, and never above 8 s."""
    full_s = min(0.5 * 2.0 ** (num_failures - 1), 8.0)
    assert 0.75 * full_s <= delay_s(num_failures, None, random_unit) <= full_s


@pytest.mark.parametrize(("asked_s", "waited_s"), [(0.0, 0.0), (7.5, 7.5), (500.0, 120.0), (-3.0, 0.0)])
def test_what_the_server_asks_for_is_kept_up_to_two_minutes(asked_s, waited_s):
    """`retry_after_s` replaces the back-off, without jitter."""
    error = bidikv_sdk.CapacityExceeded("full", status=429, retry_after_s=asked_s)
    assert delay_s(3, error, 0.9) == waited_s


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
async def test_passing_troubles_are_tried_again(client, server, status):
    """Statuses that mean `later` are repeated, and the turn is sent with the same key."""
    server.respond(status)
    server.respond(status, {"error": {"message": "x"}})
    turn = await client.session().send("Hi")
    assert turn.turn == 1
    assert len(set(keys(server))) == 1
    assert len(keys(server)) == 3
    first_s, second_s = server.clock.slept_s
    assert 0.375 <= first_s <= 0.5
    assert 0.75 <= second_s <= 1.0


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422, 500])
async def test_lasting_troubles_are_not(client, server, status):
    """A request that the server will refuse again, or a bug of the server, is not repeated."""
    server.respond(status)
    with pytest.raises(bidikv_sdk.APIStatusError):
        await client.session().send("Hi")
    assert len(server.requests) == 1
    assert server.clock.slept_s == []


async def test_attempts_are_bounded_and_the_last_error_comes_out(make_client, server):
    """After `max_retries` repetitions the caller gets the SDK's own error."""
    client = make_client(server, max_retries=1)
    for _ in range(3):
        server.fail("engine_unavailable", retry_after_s=1.5)
    with pytest.raises(bidikv_sdk.EngineUnavailable):
        await client.session().send("Hi")
    assert server.clock.slept_s == [1.5]


async def test_a_lost_reply_is_asked_for_again_and_appends_once(client, server):
    """The connection broke after the server had completed the turn: the retry gets the stored reply."""
    session = client.session()
    server.drop(completed=True)
    turn = await session.send("Hi")
    assert (turn.turn, turn.reopened) == (1, False)
    assert server.info(session.id).turn == 1
    assert len(set(keys(server))) == 1
    assert server.messages(session.id) == session.transcript


async def test_a_lost_reply_stays_in_doubt_whatever_the_next_try_says(make_client, server):
    """The first try was completed unseen and the second refused: the next turn still puts the histories right."""
    session = make_client(server, max_retries=1).session()
    server.drop(completed=True)
    server.fail("capacity_exceeded")
    with pytest.raises(bidikv_sdk.CapacityExceeded):
        await session.send("Hi")
    assert (await session.send("Other")).reopened
    assert server.messages(session.id) == session.transcript


async def test_logical_turns_have_keys_of_their_own(client, server):
    """The key names session and turn, and differs between two tries of the caller."""
    session = client.session("s")
    server.fail("invalid_request")
    with pytest.raises(bidikv_sdk.BadRequestError):
        await session.send("a")
    await session.send("a")
    first, second = keys(server)
    assert first != second
    assert first.startswith("s:1:")
    assert second.startswith("s:1:")


async def test_a_running_turn_is_waited_for(client, server):
    """A conflict that names a time is a turn that runs, as after an abort not yet seen by the server."""
    server.fail("turn_conflict", retry_after_s=0.25)
    await client.session().send("Hi")
    assert server.clock.slept_s == [0.25]


@pytest.mark.parametrize(
    ("error", "error_class", "num_requests"),
    [
        (httpx.ConnectError("x"), bidikv_sdk.APIConnectionError, 3),
        (httpx.RemoteProtocolError("x"), bidikv_sdk.APIConnectionError, 3),
        (httpx.ConnectTimeout("x"), bidikv_sdk.APITimeoutError, 3),
        (httpx.PoolTimeout("x"), bidikv_sdk.APITimeoutError, 3),
        (httpx.ReadTimeout("x"), bidikv_sdk.APITimeoutError, 1),
        (httpx.WriteTimeout("x"), bidikv_sdk.APITimeoutError, 1),
    ],
)
async def test_connection_errors_are_tried_again_but_not_timeouts_of_the_work(
    client, server, error, error_class, num_requests
):
    """A read timeout means that the caller's time is over; all others are repeated."""
    for _ in range(3):
        server.refuse(error)
    with pytest.raises(error_class, match=r"fake\.bidikv/v1/sessions/s/turns: x") as caught:
        await client.session("s").send("Hi")
    assert type(caught.value) is error_class
    assert len(server.requests) == num_requests
    assert caught.value.request_id == server.requests[-1].headers["x-request-id"]


def test_unknown_exceptions_are_never_repeated():
    """A bug must not be hidden by trying it three times."""
    assert not is_retryable(ValueError())
    assert not is_retryable(KeyboardInterrupt())


NOW = dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc)


@pytest.mark.parametrize(
    ("header", "expected_s"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        (format_datetime(NOW + dt.timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(NOW - dt.timedelta(seconds=90), usegmt=True), 0.0),
        ("soon", None),
        (None, None),
    ],
)
@pytest.mark.parametrize("body", [b"", b'{"error": {"code": "capacity_exceeded", "message": "full"}}'])
def test_retry_after_may_be_seconds_or_a_date(header, expected_s, body):
    """The header counts where the body names no time, and nonsense is no time."""
    headers = {} if header is None else {"retry-after": header}
    assert error_of(429, headers, body, NOW.timestamp()).retry_after_s == expected_s


def test_the_body_s_time_beats_the_header():
    """Our own field is the more exact one."""
    body = b'{"error": {"code": "capacity_exceeded", "message": "full", "retry_after_s": 0.1}}'
    assert error_of(429, {"retry-after": "9"}, body, 0.0).retry_after_s == 0.1


async def test_waits_are_logged_at_info(client, server, caplog):
    """A program that seems to hang can be understood from its log."""
    caplog.set_level("INFO", logger="bidikv")
    server.fail("capacity_exceeded", retry_after_s=2.0)
    await client.session().send("Hi")
    assert "try 1 failed, next in 2.0 s: 429 capacity_exceeded: scripted" in caplog.text
