"""When a held lease is renewed, and when given up: decisions by themselves, and with a thread or task."""

import asyncio
import threading

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bidikv_sdk
from bidikv_sdk._keeper import Keeper, Lost, Renew, Wait, is_transient
from bidikv_sdk.testing import ManualClock
from bidikv_sdk.wire import LeaseInfo

pytestmark = pytest.mark.anyio

DOWN = bidikv_sdk.APIConnectionError("down")


def active(remaining_s):
    """Build an active lease."""
    return LeaseInfo("active", remaining_s, 10, 1)


# ---------------------------------------------------------------- decisions


def test_the_first_renewal_is_due_at_once():
    """Entering a hold late in a lease must not wait for half a TTL."""
    assert Keeper(60.0, now_s=100.0).decide(100.0) == Renew(10.0)


def test_renewals_come_at_half_of_the_time_that_was_granted():
    """What the server granted counts, not what was asked, from when the request was sent."""
    keeper = Keeper(60.0, 0.0)
    keeper.renewed(0.0, active(20.0))
    assert keeper.decide(4.0) == Wait(6.0)
    assert keeper.decide(10.0) == Renew(10.0)


@pytest.mark.parametrize(("granted_s", "interval_s"), [(0.1, 0.1), (1.0, 0.5), (900.0, 30.0)])
def test_intervals_are_clamped(granted_s, interval_s):
    """A tiny TTL makes no busy loop, and a huge one leaves several tries."""
    keeper = Keeper(60.0, 0.0)
    keeper.renewed(0.0, active(granted_s))
    assert keeper.decide(0.0) == Wait(interval_s)


def test_a_passing_failure_is_tried_again_soon():
    """A quarter of the interval later there is another try."""
    keeper = Keeper(60.0, 0.0)
    keeper.failed(1.0, DOWN)
    assert keeper.decide(1.0) == Wait(7.5)
    assert keeper.decide(8.5) == Renew(10.0)


def test_a_full_ttl_without_success_means_lost():
    """However often it was tried, after one TTL the lease must be taken for gone, and stays so."""
    keeper = Keeper(None, 0.0)
    keeper.failed(59.0, DOWN)
    assert keeper.decide(59.0) == Wait(1.0)
    lost = keeper.decide(60.0)
    assert lost == Lost("no renewal succeeded within 60.0 s")
    assert keeper.decide(0.0) == lost


@pytest.mark.parametrize("state", ["none", "released", "expired", "revoked"])
def test_an_answer_without_an_active_lease_means_lost(state):
    """There is nothing to keep."""
    keeper = Keeper(60.0, 0.0)
    keeper.renewed(0.0, LeaseInfo(state, 0.0, 0, 0, "released"))
    assert keeper.decide(0.0) == Lost(f"the lease is {state} (released)")


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (DOWN, True),
        (bidikv_sdk.APITimeoutError("slow"), True),
        (bidikv_sdk.InternalServerError("x", status=500), True),
        (bidikv_sdk.EngineUnavailable("x", status=503), True),
        (bidikv_sdk.CapacityExceeded("x", status=429), True),
        (bidikv_sdk.TurnConflict("x", status=409, retry_after_s=1.0), True),
        (bidikv_sdk.LeaseLost("x", status=409), False),
        (bidikv_sdk.SessionNotFound("x", status=404), False),
        (bidikv_sdk.AuthenticationError("x", status=401), False),
        (bidikv_sdk.InvalidResponse("x"), False),
        (bidikv_sdk.SessionEnded("x"), False),
        (ZeroDivisionError("a bug"), False),
    ],
)
def test_failures_are_passing_or_final(error, transient):
    """Only what time can heal is tried again; a final failure is told at once."""
    assert is_transient(error) is transient
    keeper = Keeper(60.0, 0.0)
    keeper.failed(0.0, error)
    assert isinstance(keeper.decide(0.0), Wait if transient else Lost)


@given(st.floats(0.5, 1000), st.lists(st.booleans(), min_size=1, max_size=60), st.floats(0, 0.2))
def test_a_lease_is_never_believed_in_beyond_its_time(ttl_s, results, latency_s):
    """After any mix of successes and failures no renewal starts when the lease is over, and time moves on."""
    now_s = granted_until_s = 0.0
    keeper = Keeper(ttl_s, now_s)
    granted_until_s = ttl_s
    for succeeds in results:
        decision = keeper.decide(now_s)
        if isinstance(decision, Lost):
            assert now_s >= granted_until_s
            return
        if isinstance(decision, Wait):
            assert decision.delay_s > 0
            now_s += decision.delay_s
            decision = keeper.decide(now_s)
        if isinstance(decision, Renew):
            assert now_s < granted_until_s
            assert 0 < decision.timeout_s <= 10.0
            started_s, now_s = now_s, now_s + latency_s
            if succeeds:
                keeper.renewed(started_s, active(ttl_s))
                granted_until_s = started_s + ttl_s
            else:
                keeper.failed(now_s, DOWN)


# ---------------------------------------------------------------- with a thread or task


def num_extends(server):
    """Return how many renewals came."""
    return sum(request.verb == "extend" for request in server.requests)


async def test_a_hold_outlives_many_ttls(client, server, eventually):
    """A tool that takes much longer than the TTL does not cost the lease."""
    session = client.session(ttl_s=20)
    await session.send("Hi")
    async with session.hold() as hold:
        for count in range(1, 11):
            await eventually(lambda count=count: num_extends(server) >= count)
            server.advance(10)
        await eventually(lambda: num_extends(server) >= 11)
        assert not hold.lost
        assert hold.lost_reason is None
    assert (await session.status()).lease.state == "active"
    assert (await session.send("On")).cache.outcome == "fetched"


async def test_a_hold_renews_at_entry_and_ends_with_its_block(client, server, eventually):
    """One renewal comes at once with the hold's own TTL, and none after the block."""
    session = client.session(ttl_s=20)
    await session.send("Hi")
    async with session.hold(ttl_s=100):
        await eventually(lambda: num_extends(server) == 1)
    assert server.requests[-1].body["ttl_s"] == 100
    server.advance(1000)
    assert (await session.send("On")).cache.reason == "lease_expired"
    assert num_extends(server) == 1


async def test_a_lost_lease_is_told_and_not_raised(client, server, eventually, caplog):
    """The tool goes on; `lost` and a warning tell, and the next turn works."""
    session = client.session()
    await session.send("Hi")
    server.revoke(session.id)
    async with session.hold() as hold:
        await eventually(lambda: hold.lost)
        server.advance(1000)
    assert "LeaseLost: 409 lease_lost" in hold.lost_reason
    assert "lease lost while held" in caplog.text
    assert num_extends(server) == 1
    assert (await session.send("On")).cache.reason == "lease_revoked"


async def test_passing_failures_cost_nothing(client, server, eventually):
    """A renewal that fails is tried again within the TTL, without the transport's own retries."""
    session = client.session()
    await session.send("Hi")
    server.refuse(httpx.ReadTimeout("slow"), on="extend")
    server.fail("internal_error", on="extend")
    async with session.hold() as hold:
        await eventually(lambda: num_extends(server) == 1)
        server.advance(10)
        await eventually(lambda: num_extends(server) == 2)
        server.advance(10)
        await eventually(lambda: num_extends(server) == 3)
        assert not hold.lost
    assert server.clock.slept_s == []


async def test_a_dead_server_is_given_up_after_one_ttl(client, server, eventually, caplog):
    """After a full TTL without success the hold says so and stops asking."""
    session = client.session()
    await session.send("Hi")
    for _ in range(50):
        server.refuse(on="extend")
    async with session.hold(ttl_s=20) as hold:
        await eventually(lambda: num_extends(server) == 1)
        server.advance(20)
        await eventually(lambda: hold.lost)
    assert hold.lost_reason == "no renewal succeeded within 20.0 s"
    assert num_extends(server) == 1


async def test_a_bug_in_a_renewal_is_logged_and_not_raised(client, server, eventually, caplog):
    """Even an exception that is not ours does not reach the tool, but its traceback reaches the log."""
    session = client.session()
    await session.send("Hi")
    server.refuse(ZeroDivisionError("a bug"), on="extend")
    async with session.hold() as hold:
        await eventually(lambda: hold.lost)
    assert "renewing failed by a bug" in caplog.text
    assert "Traceback" in caplog.text


async def test_ending_the_session_inside_a_hold_is_quiet(client, server, eventually, caplog):
    """The keeper finds the session ended; that is no bug."""
    session = client.session()
    await session.send("Hi")
    async with session.hold() as hold:
        await eventually(lambda: num_extends(server) == 1)
        await session.end()
        server.advance(30)
        await eventually(lambda: hold.lost)
    assert "bug" not in caplog.text


async def test_the_body_s_exception_comes_out_of_a_hold(client):
    """A failing tool fails as it would without a hold."""
    session = client.session()
    await session.send("Hi")
    with pytest.raises(KeyError, match="the tool"):
        async with session.hold():
            raise KeyError("the tool")  # noqa: EM101


async def test_a_hold_does_not_wait_for_a_renewal_that_hangs(server, eventually, caplog):
    """The tool's result is not held up by a server that does not answer, and what comes later is quiet."""
    hangs, ended = threading.Event(), threading.Event()

    def handle(request):
        if request.url.path.endswith("/extend"):
            hangs.set()
            ended.wait(10)
            raise httpx.ReadError("gone")  # noqa: EM101
        return fake.handle_request(request)

    fake = server.transport()
    session = server.client(http_client=httpx.Client(transport=httpx.MockTransport(handle))).session()
    session.send("Hi")
    with session.hold() as hold:
        await eventually(hangs.is_set)
    ended.set()
    await eventually(lambda: not any(thread.name == "bidikv-hold" for thread in threading.enumerate()))
    assert not hold.lost
    assert caplog.text == ""


async def test_a_renewal_that_hangs_is_bounded_as_a_whole(server, eventually):
    """A server that does not answer costs one renewal, which is tried again."""
    num_calls = 0
    given_up = asyncio.Event()

    async def handle(request):
        nonlocal num_calls
        if request.url.path.endswith("/extend"):
            num_calls += 1
            if num_calls == 1:
                try:
                    await asyncio.Event().wait()
                finally:
                    given_up.set()
        return await fake.handle_async_request(request)

    fake = server.async_transport()
    client = server.async_client(http_client=httpx.AsyncClient(transport=httpx.MockTransport(handle)))
    session = client.session()
    await session.send("Hi")

    def is_renewed():
        server.advance(0.01)
        return num_calls == 2

    async with session.hold(ttl_s=0.5) as hold:
        await given_up.wait()
        await eventually(is_renewed)
        assert not hold.lost


def test_a_hold_ends_where_its_end_meets_a_renewal():
    """Before Python 3.12 `wait_for` swallows a cancellation that comes together with its result: the keeper went on."""

    async def main():
        answered = asyncio.Event()

        async def renew(_timeout_s):
            await answered.wait()
            return LeaseInfo("active", 60.0, 10, 1)

        async with bidikv_sdk.AsyncLeaseHold("s", 60.0, ManualClock(), renew):
            for _ in range(3):
                await asyncio.sleep(0)  # the renewal is on its way
            answered.set()
            await asyncio.sleep(0)  # … has its answer, which the keeper has not seen yet

    asyncio.run(asyncio.wait_for(main(), 5.0))
