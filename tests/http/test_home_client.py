"""The way into D's engine core: refusals come through, and what comes too late is undone."""

import asyncio
from types import SimpleNamespace

import pytest

from server_ext.core.errors import LeaseLost
from server_ext.http.errors import Refused
from server_ext.http.home_client import HomeClient

from .fakes import settled


class Channel:
    """A control channel: `reply` is a dict or an exception, which comes when `gate` is open."""

    def __init__(self, reply):
        self.reply = reply
        self.gate = asyncio.Event()
        self.calls = []

    async def call_utility_async(self, method, op, arg):
        """Answer one call."""
        self.calls.append((method, op, arg))
        await self.gate.wait()
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


def run(scenario, reply, *, is_open=True, timeout_s=5.0):
    """Run a scenario with a client over a channel."""

    async def main():
        channel = Channel(reply)
        if is_open:
            channel.gate.set()
        return await scenario(HomeClient(SimpleNamespace(engine_core=channel), timeout_s=timeout_s), channel)

    return asyncio.run(main())


def test_a_reply():
    """An op and its argument go in, its reply comes out."""

    async def scenario(client, channel):
        assert await client.call("get", {"a": 1}) == {"info": 5}
        assert channel.calls == [("bidikv_control", "get", {"a": 1})]

    run(scenario, {"info": 5})


def test_a_refusal_keeps_everything_that_it_says():
    """Code, text and the extra fields are the home's."""
    told = LeaseLost("the lease expired 4.2 s ago", reason="lease_expired", retry_after_s=1.5, param="ttl_s")

    async def scenario(client, channel):
        with pytest.raises(Refused) as refused:
            await client.call("extend", {})
        assert refused.value.info == told.info

    run(scenario, {"error": told.to_json()})


def test_a_dead_engine_is_unavailable():
    """Whatever the engine client raises, the caller may go elsewhere."""

    async def scenario(client, channel):
        with pytest.raises(Refused, match="'get': it died") as refused:
            await client.call("get", {})
        assert (refused.value.info.code, refused.value.info.status) == ("engine_unavailable", 503)
        assert refused.value.info.retry_after_s

    run(scenario, RuntimeError("it died"))


def test_a_reply_after_the_deadline_is_undone():
    """The caller is told in time; the late reply goes to `on_late`."""

    async def scenario(client, channel):
        late = []
        with pytest.raises(Refused, match=r"'begin' within 0\.01 s") as refused:
            await client.call("begin", {}, on_late=late.append)
        assert refused.value.info.code == "engine_unavailable"
        assert late == []
        channel.gate.set()
        await settled()
        assert late == [{"nonce": "n"}]

    run(scenario, {"nonce": "n"}, is_open=False, timeout_s=0.01)


def test_a_reply_after_a_cancellation_is_undone():
    """A caller that was cancelled does not leave a turn open behind it."""

    async def scenario(client, channel):
        late = []
        task = asyncio.ensure_future(client.call("begin", {}, on_late=late.append))
        await settled()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        channel.gate.set()
        await settled()
        assert late == [{"nonce": "n"}]

    run(scenario, {"nonce": "n"}, is_open=False)


@pytest.mark.parametrize("reply", [{"error": {"code": "turn_conflict", "message": "m"}}, RuntimeError("it died")])
def test_a_late_refusal_or_failure_needs_no_undoing(reply):
    """Nothing has happened that could be undone."""

    async def scenario(client, channel):
        late = []
        with pytest.raises(Refused):
            await client.call("begin", {}, on_late=late.append)
        channel.gate.set()
        await settled()
        assert late == []

    run(scenario, reply, is_open=False, timeout_s=0.01)


def test_a_call_that_nobody_waits_for_may_fail():
    """A failure is logged and goes no further."""

    async def scenario(client, channel):
        client.call_soon("return_ticket", {})
        await settled()

    run(scenario, RuntimeError("it died"))
