"""Turns that continue this process's own: they ask the home for nothing, and never go on from what has changed."""

import asyncio
import json
import random
from array import array
from dataclasses import replace

import pytest

from bidikv_sdk.wire import ErrorInfo
from server_ext.core.session_record import Session
from server_ext.http.recall import Recall, read_record

from .fakes import Script, make_settings, settled, turn_body, until

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

TURNS = "/v1/sessions/s/turns"
CHAT = "/v1/chat/completions"
KEY = ("", "s")


async def run_turn(client, turn, text="Hi", *, key=None, path=TURNS, **fields):
    """Run one turn, of session s by default."""
    headers = {"Idempotency-Key": key} if key else {}
    return await client.post(path, json=turn_body(turn, text, **fields), headers=headers)


def code_of(reply):
    """Return the code of a refusal."""
    return ErrorInfo.from_json(reply.json()["error"]).code


def home_of(stack, op, **arg):
    """Ask the home behind the server's back."""
    tenant = stack.app.state.bidikv_conductor.tenants.tenant_of({})
    return stack.engine.home.handle(op, {"tenant": tenant, "session_id": "s", **arg}, now_s=stack.engine.now_s)


def ops_since(stack, number):
    """Return the names of the ops that were called after the first `number`."""
    return [op for op, _arg in stack.engine.ops[number:] if op not in {"return_ticket", "get"}]


def record_of(key, *, turn=1, text=b"", num_ids=0):
    """Return a session's record."""
    return Session(key, turn, [b"", text], is_reopened=False, last_used_s=0.0, token_ids=array("i", range(num_ids)))


# ---------------------------------------------------------------- whole turns


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_first_turn_asks_for_the_history(stack, stream):
    """The others begin at once, and continue what D generated."""

    async def scenario(client):
        for turn in (1, 2, 3):
            await run_turn(client, turn, f"Text {turn}", stream=stream)
        assert [op for op, _arg in stack.engine.ops if op == "load"] == ["load"]
        prompts = [ids for ids, _params, _nonce in stack.engine.requests]
        # What the home has behind a turn is what the next one began with.
        ids = array("i", home_of(stack, "load", turn=4)["token_ids"]).tolist()
        assert all(after[: len(before)] == before for before, after in zip(prompts, [*prompts[1:], ids], strict=True))

    stack.run(scenario)


def test_a_history_that_has_changed_meanwhile_is_asked_for(stack):
    """The home refuses what was rendered from another history; the caller sees nothing of it."""

    async def scenario(client):
        await run_turn(client, 1)
        chunk = json.dumps({"messages": [{"role": "user", "content": "Another text"}]}).encode()
        home_of(stack, "open", turn=1, chunk=chunk, replace=True)
        number = len(stack.engine.ops)
        assert (await run_turn(client, 2)).json()["bidikv"]["cache"]["reason"] == "messages_changed"
        assert ops_since(stack, number) == ["begin", "load", "begin", "settle"]
        first, second = [stack.engine.renderer.tokenizer.decode(ids) for ids, _params, _nonce in stack.engine.requests]
        assert "Another text" in second
        assert "Another text" not in first

    stack.run(scenario)


def test_a_session_that_is_gone_is_not_brought_back(stack):
    """A turn of it is refused; a whole history opens it anew."""

    async def scenario(client):
        await run_turn(client, 1)
        home_of(stack, "end")
        assert code_of(await run_turn(client, 2)) == "session_not_found"
        await run_turn(client, 1)
        home_of(stack, "end")
        messages = [{"role": "user", "content": "A whole history."}]
        reply = await client.post(CHAT, json={"messages": messages, "session_id": "s"})
        assert reply.json()["bidikv"]["turn"] == 1

    stack.run(scenario)


def test_an_owner_s_own_change_is_known(stack):
    """Behind a rewind, a replacement and an end nothing is begun in vain, and nothing is remembered."""
    recall = stack.app.state.bidikv_conductor.recall

    async def scenario(client):
        for path, body in (
            ("/v1/sessions/s/rewind", {"turn": 1}),
            ("/v1/sessions", {"session_id": "s", "turn": 1, "replace": True}),
            ("/v1/sessions/s/end", {}),
        ):
            await run_turn(client, 1)
            assert len(recall) == 1
            assert (await client.post(path, json=body)).status_code == 200
            assert len(recall) == 0
            number = len(stack.engine.ops)
            reply = await run_turn(client, 2)
            assert ops_since(stack, number)[:1] != ["begin"]
            assert reply.status_code == (404 if path.endswith("end") else 200)
            await client.post("/v1/sessions/s/end", json={})

    stack.run(scenario)


def test_a_repetition_is_the_home_s_business(stack):
    """The same turn with its key gets the stored reply; with another one it is refused."""

    async def scenario(client):
        await run_turn(client, 1)
        first = await run_turn(client, 2, key="k")
        again = await run_turn(client, 2, key="k")
        assert again.json()["choices"] == first.json()["choices"]
        assert code_of(await run_turn(client, 2, key="other")) == "turn_conflict"
        assert len(stack.engine.requests) == 2

    stack.run(scenario)


def test_of_two_turns_at_a_time_one_is_refused(stack):
    """The second one is refused before anything of it is computed."""

    async def scenario(client):
        await run_turn(client, 1)
        stack.engine.script = Script(pause_after=1)
        running = asyncio.ensure_future(run_turn(client, 2))
        await until(lambda: len(stack.engine.requests) == 2)
        number = len(stack.engine.ops)
        assert code_of(await run_turn(client, 2)) == "turn_conflict"
        assert ops_since(stack, number) == ["load"]
        stack.engine.script.gate.set()
        assert (await running).status_code == 200

    stack.run(scenario)


def test_behind_a_turn_that_failed_the_home_is_asked(stack):
    """Nobody knows what a failed turn has left behind."""

    async def scenario(client):
        await run_turn(client, 1)
        stack.engine.script = Script(fail_after=1)
        assert (await run_turn(client, 2)).status_code == 500
        await settled()
        stack.engine.script = Script()
        number = len(stack.engine.ops)
        assert (await run_turn(client, 2)).json()["bidikv"]["turn"] == 2
        assert ops_since(stack, number) == ["load", "begin", "settle"]

    stack.run(scenario)


def test_an_engine_that_does_not_answer_is_asked_once(stack):
    """Its time is over with the first call: the caller is not kept waiting for a second one."""
    stack.configure(control_timeout_s=0.05)

    async def scenario(client):
        await run_turn(client, 1)
        number = len(stack.engine.ops)
        stack.engine.delay_op = "begin"
        assert code_of(await run_turn(client, 2)) == "engine_unavailable"
        assert (stack.engine.num_delayed, ops_since(stack, number)) == (1, [])
        stack.engine.delay_op = ""
        stack.engine.delay.set()
        await settled()
        assert ops_since(stack, number) == ["begin", "abandon"]
        assert (await run_turn(client, 2)).status_code == 200

    stack.run(scenario)


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"where": "there"}'}}


def test_what_cannot_be_rendered_is_refused_once(stack):
    """A delta that is too long says so, and leaves what is known as it was; tool calls in it stay what they are."""

    async def scenario(client):
        await run_turn(client, 1)
        number = len(stack.engine.ops)
        delta = [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "word " * 3000},
        ]
        reply = await client.post(TURNS, json={"turn": 2, "messages": delta})
        assert (code_of(reply), ops_since(stack, number)) == ("context_length_exceeded", [])
        assert (await run_turn(client, 2)).status_code == 200
        assert ops_since(stack, number) == ["begin", "settle"]

    stack.run(scenario)


@pytest.mark.parametrize("arguments", ['{"where": "there"}', "bad"])
def test_what_is_rendered_twice_is_rendered_from_what_was_sent(stack, arguments):
    """Rendering changes messages in place; a whole history with tool calls opens the session that is gone anew."""
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Look there."},
        {"role": "assistant", "content": None, "reasoning_content": "So I shall.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Nothing."},
    ]

    async def scenario(client):
        await run_turn(client, 1)
        home_of(stack, "end")
        number = len(stack.engine.ops)
        again = (await client.post(CHAT, json={"messages": messages, "session_id": "s"})).json()
        assert ops_since(stack, number) == ["begin", "load", "begin", "settle"]
        assert again["bidikv"]["turn"] == 1
        other = (await client.post(CHAT, json={"messages": messages, "session_id": "other"})).json()
        assert other["bidikv"]["turn"] == 1
        prompts = [ids for ids, _params, _nonce in stack.engine.requests]
        assert prompts[-1] == prompts[-2]

    stack.run(scenario)


def test_a_session_that_ends_while_its_turn_does_is_not_remembered(stack):
    """The home has settled the turn, and is asked to end the session before the turn knows that it was settled."""
    recall = stack.app.state.bidikv_conductor.recall

    async def scenario(client):
        await run_turn(client, 1)
        stack.engine.delay_reply_op = "settle"
        turn = asyncio.ensure_future(run_turn(client, 2))
        await until(lambda: stack.engine.num_delayed == 1)
        ending = asyncio.ensure_future(client.post("/v1/sessions/s/end", json={}))
        await until(lambda: ops_since(stack, 0)[-1] == "end")
        stack.engine.delay.set()
        assert (await turn).status_code == 200
        assert (await ending).status_code == 200
        assert len(recall) == 0

    stack.run(scenario)


def test_prompts_are_forgotten_on_a_server_that_nobody_calls_any_more(stack):
    """Behind their retention, without another turn."""
    stack.configure(home=replace(make_settings().home, session_retention_s=0.05, max_ttl_s=0.05, default_ttl_s=0.05))
    recall = stack.app.state.bidikv_conductor.recall

    async def scenario(client):
        await run_turn(client, 1)
        await run_turn(client, 1, path="/v1/sessions/t/turns")
        assert len(recall) == 2
        async with asyncio.timeout(10):  # so that it fails, and does not hang
            await until(lambda: len(recall) == 0)

    stack.run(scenario)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_recalled_is_what_the_home_has(stack, seed):
    """Whatever whole histories a client sends, longer, shorter or edited ones."""
    draw = random.Random(seed)
    recall = stack.app.state.bidikv_conductor.recall

    async def scenario(client):
        messages = []
        for number in range(8):
            del messages[2 * draw.randint(0, len(messages) // 2) :]
            if messages and draw.random() < 0.3:
                messages[0] = {"role": "user", "content": f"Edited {number}"}
            messages.append({"role": "user", "content": f"Text {number}"})
            reply = await client.post(CHAT, json={"messages": messages, "session_id": "s"})
            messages.append(reply.json()["choices"][0]["message"])
            loaded = home_of(stack, "load", turn=None)
            tenant = stack.app.state.bidikv_conductor.tenants.tenant_of({})
            known, kept = read_record((tenant, "s"), loaded), recall.take((tenant, "s"), None)
            for name in ("turn", "transcript", "token_ids", "id_counts", "replaced", "revision"):
                assert getattr(kept, name) == getattr(known, name), name
            recall.keep(kept, now_s=0.0)

    stack.run(scenario)


# ---------------------------------------------------------------- what is kept


def test_a_record_is_taken_once():
    """And only for the turn that is next."""
    recall = Recall(max_bytes=100_000, max_age_s=60)
    for turn, is_found in ((2, True), (None, True), (1, False), (3, False)):
        recall.keep(record_of(KEY), now_s=0)
        assert (recall.take(KEY, turn) is not None) is is_found
        assert len(recall) == (not is_found)


def test_those_used_longest_ago_make_room():
    """The bound is on bytes; one that is too large alone is not kept, and costs no other its place."""
    recall = Recall(max_bytes=20_000, max_age_s=60)
    for name in "abc":
        recall.keep(record_of(("", name), text=b"x" * 4_000, num_ids=500), now_s=0)
    recall.keep(record_of(("", "a"), text=b"x" * 4_000, num_ids=500), now_s=0)
    assert [recall.take(("", name), None) is not None for name in "bac"] == [False, True, True]
    for name in "bc":
        recall.keep(record_of(("", name)), now_s=0)
    recall.keep(record_of(("", "c"), text=b"x" * 20_000), now_s=0)
    assert [recall.take(("", name), None) is not None for name in "bc"] == [True, False]


def test_what_was_not_used_for_too_long_is_dropped():
    """Each when it is due; it is told when the next one is."""
    recall = Recall(max_bytes=100_000, max_age_s=60)
    recall.keep(record_of(("", "a")), now_s=0)
    recall.keep(record_of(("", "b")), now_s=50)
    recall.keep(record_of(("", "c")), now_s=55)
    assert (recall.sweep(now_s=59), len(recall)) == (1, 3)
    assert (recall.sweep(now_s=60), len(recall)) == (50, 2)
    assert (recall.sweep(now_s=115), len(recall)) == (None, 0)
