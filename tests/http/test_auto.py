"""Turns that choose their own way, through the HTTP routes: an engine, a P and a real home that learns."""

import httpx
import pytest

from bidikv_sdk.wire import SessionInfo
from server_ext.core.settings import HomeSettings

from .fakes import Stack, ticket_of, turn_body

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")
URL = "/v1/sessions/alice/turns"


@pytest.fixture
def auto(vllm_config, renderer):
    """A stack whose D chooses, as it does unless it is told otherwise."""
    stack = Stack(vllm_config, renderer)
    stack.configure(home=HomeSettings(budget_fraction=1.0, min_fetch_tokens=1))
    return stack


async def take(client, turn, **fields):
    """Run a turn and return its `bidikv` object."""
    reply = await client.post(URL, json=turn_body(turn, **fields), headers={"X-Session-ID": "alice"})
    assert reply.status_code == 200, reply.text
    return SessionInfo.from_json(reply.json()["bidikv"])


def teach(stack, **seconds):
    """Let the home have seen what prefilling, appending, fetching and handing over take."""
    rates = stack.engine.rates
    for i in range(4):
        rates.observe_prefill(seconds["prefill"], 20 + i)
        rates.observe_append(seconds["append"], 20 + i)
        rates.observe_fetch(seconds["fetch"], 1000 + i, pair="http://p1")
        rates.observe_handover(seconds["handover"], 1000 + i, pair="http://p1")


def test_auto_appends_where_that_is_fastest(auto):
    """P is not asked, and the report has the seconds that were expected of each way."""
    teach(auto, prefill=5.0, append=0.01, fetch=1.0, handover=1.0)

    async def scenario(client):
        await take(client, 1, bidikv={"route": "prefill"})
        cache = (await take(client, 2)).cache
        assert len(auto.p.calls) == 1
        assert (cache.reason, cache.choice.by) == ("cheapest", "cheapest")
        assert cache.choice.local < min(cache.choice.fetch, cache.choice.prefill)

    auto.run(scenario)


def test_auto_fetches_where_that_is_fastest(auto):
    """P gets a ticket, and the outcome is told as always."""
    teach(auto, prefill=0.01, append=9.0, fetch=0.001, handover=0.001)
    for _ in range(8):
        auto.engine.rates.observe_prefill(9.0, 500)

    async def scenario(client):
        await take(client, 1, text="A long story. " * 40, bidikv={"route": "prefill"})
        cache = (await take(client, 2)).cache
        assert ticket_of(auto.p.calls[-1]) is not None
        assert (cache.outcome, cache.reason) == ("fetched", "cheapest")
        assert cache.choice.fetch < min(cache.choice.local, cache.choice.prefill)

    auto.run(scenario)


def test_a_caller_that_asks_for_auto_gets_it_whatever_the_setting(stack):
    """`auto` is a route of its own: asked for, it wins over the server's default; left out, it does not."""

    async def scenario(client):
        assert (await take(client, 1)).cache.choice is None
        cache = (await take(client, 2, bidikv={"route": "auto"})).cache
        assert cache.choice is not None
        assert cache.reason == "cheapest"

    stack.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_what_turns_show_reaches_the_home(stack, stream):
    """A fetched turn tells how long P and its read took, and which P it was; the home takes it without complaint."""

    async def scenario(client):
        await client.post(URL, json=turn_body(1, stream=stream))
        await client.post(URL, json=turn_body(2, stream=stream))
        first, second = (settled["observed"] for settled in stack.engine.ops_named("settle"))
        assert (first["fetched_tokens"], first["fetch_s"], first["pair"]) == (0, None, "http://p1")
        assert second["fetched_tokens"] > 0
        assert (second["fetch_s"], second["failed_pairs"], second["is_read_failed"]) == (0.01, [], False)
        assert 0 < second["prefill_s"] < 60
        # The fake engine notes no times, so a reply that comes whole does not tell when it began.
        assert (second["handover_s"] is not None) == stream

    stack.run(scenario)


def test_a_first_token_that_vllm_timed_counts_for_whole_replies(stack, monkeypatch):
    """A reply that comes whole has its time to first token from vLLM's own clock."""
    generate = stack.engine.generate

    async def timed(*args, **options):
        async for output in generate(*args, **options):
            output.metrics = type("Stats", (), {"first_token_latency": 0.25})()
            yield output

    monkeypatch.setattr(stack.engine, "generate", timed)

    async def scenario(client):
        timings = (await take(client, 1)).cache.timings_s
        assert 0.25 <= timings.handover < 0.3
        assert timings.ttft > timings.handover

    stack.run(scenario)


def test_a_p_that_is_gone_is_not_asked_again_at_once(auto):
    """The turn that found it gone is computed on D, and so is the next one, without asking."""
    teach(auto, prefill=0.01, append=9.0, fetch=0.001, handover=0.001)

    async def scenario(client):
        auto.p.answer = lambda body: httpx.ConnectError("refused")
        first = await take(client, 1)
        assert first.cache.reason == "prefill_unavailable"
        second = await take(client, 2)
        assert len(auto.p.calls) == 1
        assert (second.cache.choice.by, second.cache.choice.fetch) == ("only", None)
        auto.engine.now_s += 3
        auto.p.answer = lambda body: httpx.Response(200, json=auto.p.rightly(body))
        await take(client, 3)
        assert len(auto.p.calls) == 2

    auto.run(scenario)


def test_a_p_with_other_weights_is_left_alone_too(auto):
    """What it computes is of no use, however fast it is."""
    teach(auto, prefill=0.01, append=9.0, fetch=0.001, handover=0.001)

    async def scenario(client):
        def answer(body):
            reply = auto.p.rightly(body)
            reply["kv_transfer_params"]["bidikv"]["fingerprint"] = "another model"
            return httpx.Response(200, json=reply)

        auto.p.answer = answer
        assert (await take(client, 1)).cache.reason == "model_changed"
        assert (await take(client, 2)).cache.choice.by == "only"

    auto.run(scenario)


def test_a_failed_read_is_told_as_one(stack):
    """The home learns that the read failed, not that computing is slow."""

    async def scenario(client):
        await take(client, 1)

        def answer(body):
            reply = stack.p.rightly(body)
            reply["kv_transfer_params"]["bidikv"] |= {
                "fetched_tokens": 0, "fetch_s": None, "read_age_s": None, "reason": "read_failed",
            }  # fmt: skip
            return httpx.Response(200, json=reply)

        stack.p.answer = answer
        assert (await take(client, 2)).cache.reason == "read_failed"
        assert stack.engine.ops_named("settle")[-1]["observed"]["is_read_failed"]

    stack.run(scenario)


def test_a_forced_fetch_without_a_lease_says_why(stack):
    """The way differs from what was asked for, and the reason is the lease's, not the caller's."""

    async def scenario(client):
        await take(client, 1)
        await client.post("/v1/sessions/alice/release", json={"session_id": "alice"})
        cache = (await take(client, 2, bidikv={"route": "fetch"})).cache
        assert (cache.outcome, cache.reason) == ("recomputed", "released")

    stack.run(scenario)


def test_a_second_p_that_answers_is_told_with_the_one_that_did_not(stack):
    """Both are named, so that the first is left alone and the second learned from."""
    stack.configure(prefill_urls=("http://p0", "http://p1"))
    calls = []

    def answer(body):
        calls.append(body)
        is_first = len(calls) == 1
        return httpx.ConnectError("refused") if is_first else httpx.Response(200, json=stack.p.rightly(body))

    stack.p.answer = answer

    async def scenario(client):
        await take(client, 1)
        (settled,) = stack.engine.ops_named("settle")
        assert (settled["observed"]["pair"], settled["observed"]["failed_pairs"]) == ("http://p1", ["http://p0"])

    stack.run(scenario)
