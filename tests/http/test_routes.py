"""The session routes of D, from HTTP down to a real home: whole calls, and every way in which a turn can fail."""

import asyncio
import json

import httpx
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from bidikv_sdk.wire import ErrorInfo, SessionInfo, sessions_from_json
from server_ext.core.tickets import verify
from server_ext.http import routes

from .fakes import SECRET, Caller, Script, events_of, settled, ticket_of, turn_body, until

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

TURNS = "/v1/sessions/s/turns"


def info_of(response):
    """Return the `bidikv` object of a good reply."""
    assert response.status_code == 200, response.text
    return SessionInfo.from_json(response.json()["bidikv"])


def error_of(response):
    """Return the error of a reply."""
    error = ErrorInfo.from_json(response.json()["error"])
    assert response.status_code == error.status
    return error


async def run_turn(client, turn, text="Hi", *, key=None, path=TURNS, **fields):
    """Run one turn."""
    headers = {"Idempotency-Key": key} if key else {}
    return await client.post(path, json=turn_body(turn, text, **fields), headers=headers)


async def state_of(client):
    """Return the state of session s."""
    return info_of(await client.get("/v1/sessions/s"))


# ---------------------------------------------------------------- sessions


def test_open_look_list_end(stack):
    """A session from its first to its last call."""

    async def scenario(client):
        opened = info_of(await client.post("/v1/sessions", json={"session_id": "s", "bidikv": {"protocol": 1}}))
        assert (opened.session, opened.turn, opened.lease.state) == ("s", 0, "none")
        assert await state_of(client) == opened
        listing = sessions_from_json((await client.get("/v1/sessions")).json())
        assert listing == [opened]
        assert info_of(await client.post("/v1/sessions/s/end", json={"session_id": "s"})).turn == 0
        assert error_of(await client.get("/v1/sessions/s")).code == "session_not_found"
        assert error_of(await client.delete("/v1/sessions/s")).code == "session_not_found"

    stack.run(scenario)


def test_who_looks_sees_what_the_last_turn_did(stack):
    """Get and list carry the report of the last turn; other replies do not."""

    async def scenario(client):
        told = info_of(await client.post("/v1/sessions/s/turns", json=turn_body(1)))
        assert told.last_turn is None
        seen = await state_of(client)
        assert seen.cache is None
        assert (seen.last_turn.outcome, seen.last_turn.reason) == (told.cache.outcome, told.cache.reason)
        assert seen.last_turn.prompt_tokens == told.cache.prompt_tokens
        assert sessions_from_json((await client.get("/v1/sessions")).json())[0].last_turn == seen.last_turn
        assert info_of(await client.post("/v1/sessions/s/extend", json={})).last_turn is None

    stack.run(scenario)


def test_open_with_a_history(stack):
    """The next turn is rendered from the given history, and the report says that its home was lost."""

    async def scenario(client):
        history = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}]
        body = {"session_id": "s", "messages": history, "turn": 1}
        assert info_of(await client.post("/v1/sessions", json=body)).turn == 1
        error = error_of(await client.post("/v1/sessions", json={"session_id": "s", "turn": 5}))
        assert (error.code, error.expected_turn) == ("turn_conflict", 2)
        assert info_of(await client.post("/v1/sessions", json={**body, "turn": 3, "replace": True})).turn == 3
        info = info_of(await run_turn(client, 4, "third"))
        assert (info.turn, info.cache.reason) == (4, "home_lost")
        prompt = stack.engine.renderer.get_tokenizer().decode(stack.engine.requests[0][0])
        assert prompt.index("first") < prompt.index("second") < prompt.index("third")

    stack.run(scenario)


def test_extend_and_release(stack):
    """Extend keeps the lease, release gives the blocks back; without a lease there is nothing to extend."""

    async def scenario(client):
        await run_turn(client, 1)
        assert info_of(await client.post("/v1/sessions/s/extend", json={"ttl_s": 120})).lease.remaining_s == 120
        assert info_of(await client.post("/v1/sessions/s/extend", json={"ttl_s": 5})).lease.remaining_s == 120
        assert stack.num_pinned > 0
        assert info_of(await client.post("/v1/sessions/s/release")).lease.state == "released"
        assert info_of(await client.post("/v1/sessions/s/release")).lease.state == "released"
        assert stack.num_pinned == 0
        error = error_of(await client.post("/v1/sessions/s/extend", json={"ttl_s": 120}))
        assert (error.code, error.reason) == ("lease_lost", "released")
        assert error_of(await client.post("/v1/sessions/s/extend", json={"ttl_s": 0})).param == "ttl_s"

    stack.run(scenario)


def test_a_fork_goes_on_from_its_turn(stack):
    """The child continues the parent's own ids, from its own lease on the same blocks; a retry makes no second one."""

    async def scenario(client):
        for turn, text in enumerate(("Hi", "More", "Most"), 1):
            await run_turn(client, turn, text)
        num_pinned, num_free = stack.num_pinned, stack.engine.pool.num_free_blocks()
        body = {"session_id": "s", "child_id": "c", "at_turn": 1, "ttl_s": 40, "bidikv": {"protocol": 1}}
        for _ in range(2):
            info = info_of(await client.post("/v1/sessions/s/fork", json=body))
            assert (info.session, info.turn, info.lease.state, info.lease.remaining_s) == ("c", 1, "active", 40)
        assert stack.num_pinned == num_pinned + info.lease.num_blocks
        assert stack.engine.pool.num_free_blocks() == num_free
        info = info_of(await run_turn(client, 2, "Other", path="/v1/sessions/c/turns"))
        ids_1, child_ids = stack.engine.requests[0][0], stack.engine.requests[-1][0]
        said = stack.engine.renderer.get_tokenizer().encode("Hello there.")
        assert child_ids[: len(ids_1) + len(said)] == [*ids_1, *said]
        assert (info.cache.outcome, info.cache.reason) == ("fetched", "cheapest")
        assert info.cache.fetched_tokens == info.cache.held_tokens == len(ids_1) + len(said)
        await client.post("/v1/sessions/c/end")
        assert (await state_of(client)).lease.state == "active"
        assert info_of(await client.post("/v1/sessions/s/fork", json={"child_id": "now"})).turn == 3

    stack.run(scenario)


def test_a_rewound_session_goes_on_from_there(stack):
    """What came behind is gone from the prompt and from the lease."""

    async def scenario(client):
        for turn, text in enumerate(("Hi", "More", "Most"), 1):
            await run_turn(client, turn, text)
        for _ in range(2):
            info = info_of(await client.post("/v1/sessions/s/rewind", json={"turn": 1}))
            assert (info.turn, info.lease.state) == (1, "active")
        info = info_of(await run_turn(client, 2, "Other"))
        assert (info.cache.outcome, info.cache.diverged_at) == ("fetched", None)
        prompt = stack.engine.renderer.get_tokenizer().decode(stack.engine.requests[-1][0])
        assert ("Hi" in prompt, "Other" in prompt, "More" in prompt) == (True, True, False)

    stack.run(scenario)


@pytest.mark.parametrize(
    ("verb", "body", "param"),
    [
        ("fork", {}, "child_id"),
        ("fork", {"child_id": 5}, "child_id"),
        ("fork", {"child_id": "x" * 300}, "child_id"),
        ("fork", {"child_id": "s"}, "child_id"),
        ("fork", {"child_id": "c", "at_turn": -1}, "turn"),
        ("fork", {"child_id": "c", "at_turn": "1"}, "turn"),
        ("fork", {"child_id": "c", "ttl_s": 0}, "ttl_s"),
        ("rewind", {}, "turn"),
        ("rewind", {"turn": True}, "turn"),
    ],
)
def test_wrong_forks_and_rewinds_are_refused_by_name(stack, verb, body, param):
    """Each is a 400 that names the field."""

    async def scenario(client):
        await run_turn(client, 1)
        error = error_of(await client.post(f"/v1/sessions/s/{verb}", json=body))
        assert (error.code, error.param) == ("invalid_request", param)
        assert len((await client.get("/v1/sessions")).json()["data"]) == 1

    stack.run(scenario)


@pytest.mark.parametrize("verb", ["fork", "rewind"])
def test_no_fork_and_no_rewind_while_a_turn_runs(stack, verb):
    """The caller is told to wait; and turns that are not known are a conflict with the number that fits."""
    stack.engine.script = Script(pause_after=1)

    async def scenario(client):
        running = asyncio.ensure_future(run_turn(client, 1))
        await until(lambda: len(stack.engine.requests) == 1)
        body = {"child_id": "c", "at_turn": 0, "turn": 0}
        error = error_of(await client.post(f"/v1/sessions/s/{verb}", json=body))
        assert (error.code, error.retry_after_s) == ("turn_conflict", 0.2)
        stack.engine.script.gate.set()
        await running
        error = error_of(await client.post(f"/v1/sessions/s/{verb}", json={"child_id": "c", "at_turn": 2, "turn": 2}))
        assert (error.code, error.expected_turn) == ("turn_conflict", 2)

    stack.run(scenario)


def test_a_replaced_transcript_says_so(stack):
    """Where the next prompt leaves what D holds, the report says why."""

    async def scenario(client):
        await run_turn(client, 1, "A text that is long enough for a block or two. " * 4)
        history = [{"role": "user", "content": "A text that is longer"}, {"role": "assistant", "content": "Yes."}]
        body = {"session_id": "s", "messages": history, "turn": 1, "replace": True}
        await client.post("/v1/sessions", json=body)
        cache = info_of(await run_turn(client, 2)).cache
        assert (cache.outcome, cache.reason) == ("fetched", "messages_changed")
        assert 0 < cache.diverged_at == cache.fetched_tokens < cache.held_tokens
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        assert info_of(await run_turn(client, 3, tools=tools)).cache.reason == "tools_changed"
        assert info_of(await run_turn(client, 4, tools=tools)).cache.reason == "cheapest"

    stack.run(scenario)


def test_another_tenant_sees_no_difference_to_an_unknown_session(stack):
    """With another key a session is not there: same status, same text, on every route."""
    stack.configure(has_keys=True)

    async def scenario(client):
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("key-a", "key-b"))
        assert info_of(await client.post(TURNS, json=turn_body(1), headers=mine)).turn == 1
        for method, verb, body in (
            ("GET", "", None),
            ("POST", "/turns", turn_body(2)),
            ("POST", "/extend", {"ttl_s": 5}),
            ("POST", "/release", {}),
            ("POST", "/fork", {"child_id": "c"}),
            ("POST", "/rewind", {"turn": 0}),
            ("POST", "/end", {}),
            ("DELETE", "", None),
        ):
            calls = [
                await client.request(method, f"/v1/sessions/{name}{verb}", json=body, headers=other)
                for name in ("s", "x")
            ]
            assert [error_of(call).code for call in calls] == ["session_not_found"] * 2
            assert calls[0].text == calls[1].text.replace("'x'", "'s'")
        assert (await client.get("/v1/sessions", headers=other)).json()["data"] == []
        assert len((await client.get("/v1/sessions", headers=mine)).json()["data"]) == 1
        # The same id is another session there, and shares nothing.
        theirs = info_of(await client.post(TURNS, json=turn_body(1), headers=other))
        assert (theirs.turn, theirs.cache.held_tokens) == (1, 0)
        assert len({call["cache_salt"] for call in stack.p.calls}) == 2

    stack.run(scenario)


# ---------------------------------------------------------------- turns


def test_two_turns(stack):
    """The second turn's prompt continues the first one's ids, and P reads them from D."""

    async def scenario(client):
        first = await run_turn(client, 1)
        info = info_of(first)
        assert first.json()["choices"][0]["message"]["content"] == "Hello there."
        assert (info.turn, info.lease.state, info.cache.outcome) == (1, "active", "recomputed")
        assert ticket_of(stack.p.calls[0]) is None
        info = info_of(await run_turn(client, 2, "More"))
        (ids_1, _, nonce_1), (ids_2, params, nonce_2) = stack.engine.requests
        said = stack.engine.renderer.get_tokenizer().encode("Hello there.")
        assert ids_2[: len(ids_1) + len(said)] == [*ids_1, *said]
        assert ticket_of(stack.p.calls[1])["remote_num_tokens"] == len(ids_1) + len(said)
        assert (info.cache.outcome, info.cache.held_tokens) == ("fetched", len(ids_1) + len(said))
        assert info.cache.fetched_tokens + info.cache.computed_tokens == info.cache.prompt_tokens == len(ids_2)
        # The engine gets P's parameters, signed, under a name that no client can know.
        assert verify(params.extra_args["kv_transfer_params"], SECRET)["remote_engine_id"] == "p"
        assert nonce_1 != nonce_2
        assert "s" not in (nonce_1, nonce_2)

    stack.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_no_reply_says_where_blocks_lie(stack, stream):
    """Block ids, hosts and ports stay inside."""

    async def scenario(client):
        await run_turn(client, 1)
        reply = await run_turn(client, 2, stream=stream)
        assert "a secret host" not in reply.text
        assert "remote_block_ids" not in reply.text

    stack.run(scenario)


@pytest.mark.parametrize(
    ("route", "asked", "ticket", "reason"),
    [
        ("fetch", 2, True, "forced"),
        ("prefill", 2, False, "forced"),
        ("recompute", 2, False, "forced"),
        ("local", 1, False, "forced"),
    ],
)
def test_a_route_may_be_forced(stack, route, asked, ticket, reason):
    """Each goes its way: whether P is asked, and with a ticket."""

    async def scenario(client):
        await run_turn(client, 1)
        info = info_of(await run_turn(client, 2, bidikv={"route": route}))
        assert len(stack.p.calls) == asked
        if asked == 2:
            assert (ticket_of(stack.p.calls[1]) is not None) == ticket
            assert (stack.p.calls[1]["cache_salt"] is not None) == (route == "recompute")
        assert info.cache.reason == reason

    stack.run(scenario)


def test_a_forced_fetch_without_a_lease_says_why_nothing_was_fetched(stack):
    """What the caller asked for was not possible, and the reason is the lease's."""

    async def scenario(client):
        first = info_of(await run_turn(client, 1, bidikv={"route": "fetch"}))
        assert first.cache.reason == "first_turn"
        (await client.post("/v1/sessions/s/release", json={"session_id": "s"})).raise_for_status()
        second = info_of(await run_turn(client, 2, bidikv={"route": "fetch"}))
        assert (second.cache.outcome, second.cache.reason) == ("recomputed", "released")
        assert second.cache.held_tokens == 0

    stack.run(scenario)


def test_a_stream(stack):
    """The last event before the end has usage, the report and no choices."""

    async def scenario(client):
        reply = await run_turn(client, 1, stream=True)
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, last, done = events_of(reply.text)
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Hello there."
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
        assert SessionInfo.from_json(last["bidikv"]).turn == 1
        assert info_of(await run_turn(client, 2)).cache.outcome == "fetched"

    stack.run(scenario)


def test_a_retry_gets_the_stored_reply(stack):
    """The last turn with its key runs nothing; as a stream it is one chunk with the whole message."""
    stack.engine.script = Script('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    async def scenario(client):
        first = (await run_turn(client, 1, key="k", tools=tools)).json()
        again = (await run_turn(client, 1, key="k", tools=tools)).json()
        assert first["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
        assert again["choices"] == first["choices"]
        assert again["bidikv"]["cache"]["outcome"] == first["bidikv"]["cache"]["outcome"]
        chunk, last, done = events_of((await run_turn(client, 1, key="k", stream=True)).text)
        assert chunk["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
        assert chunk["choices"][0]["finish_reason"] == "tool_calls"
        assert (last["choices"], last["bidikv"]["turn"], done) == ([], 1, "[DONE]")
        assert len(stack.engine.requests) == 1
        error = error_of(await run_turn(client, 1, key="other"))
        assert (error.code, error.expected_turn) == ("turn_conflict", 2)

    stack.run(scenario)


def test_a_retry_that_overtakes_its_first_try_gets_the_stored_reply(stack):
    """A try that had loaded the session, but not begun, when the other one completed, runs nothing either."""

    async def scenario(client):
        stack.engine.delay_op = "begin"
        slow = asyncio.ensure_future(run_turn(client, 1, key="k"))
        await until(lambda: stack.engine.num_delayed == 1)
        stack.engine.delay_op = ""
        done = await run_turn(client, 1, key="k")
        stack.engine.delay.set()
        assert (await slow).json()["choices"] == done.json()["choices"]
        assert len(stack.engine.requests) == 1
        assert (await state_of(client)).turn == 1

    stack.run(scenario)


@pytest.mark.parametrize(("num_cached", "outcome"), [(32, "local"), (0, "recomputed")])
def test_what_d_could_not_read_from_p_is_told(stack, num_cached, outcome):
    """The report says what D did with the prompt, not what P had done for nothing; so does the usage."""

    async def scenario(client):
        await run_turn(client, 1, "A text that is long enough for a block or two. " * 4)
        stack.engine.script.is_read_failing = True
        stack.engine.script.num_cached_tokens = num_cached
        reply = await run_turn(client, 2)
        cache = info_of(reply).cache
        assert (cache.outcome, cache.reason) == (outcome, "read_failed")
        assert (cache.reused_tokens, cache.fetched_tokens) == (num_cached, 0)
        assert cache.computed_tokens == cache.prompt_tokens - num_cached
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
        stack.engine.script = Script()
        assert info_of(await run_turn(client, 3)).cache.outcome == "fetched"

    stack.run(scenario)


def test_what_other_weights_computed_is_not_read(stack):
    """Where P has another model or other weights than D, D computes the turn itself, and says why."""

    async def scenario(client):
        stack.p.answer = lambda body: httpx.Response(200, json=other_weights(stack.p.rightly(body)))
        info = info_of(await run_turn(client, 1))
        assert (info.cache.outcome, info.cache.reason) == ("recomputed", "model_changed")
        _, params, _ = stack.engine.requests[0]
        assert params.extra_args is None

    def other_weights(answer):
        answer["kv_transfer_params"]["bidikv"]["fingerprint"] = "model/after training"
        return answer

    stack.run(scenario)


def test_a_turn_is_free_again_even_where_the_engine_cannot_abort(stack):
    """Whatever closing the generation raises, the turn is abandoned and the next one works."""
    stack.engine.script = Script(fail_after=2, error=EngineDeadError())

    async def scenario(client):
        assert (await run_turn(client, 1)).status_code >= 500
        stack.engine.script = Script()
        assert info_of(await run_turn(client, 1)).turn == 1

    stack.run(scenario)


def test_tools_that_come_later_are_in_the_prompt(stack):
    """Tools of a later turn replace the session's, and stay for the turns after it."""
    tools = [{"type": "function", "function": {"name": "unheard_of", "parameters": {"type": "object"}}}]

    async def scenario(client):
        await run_turn(client, 1)
        await run_turn(client, 2, tools=tools)
        await run_turn(client, 3)
        decode = stack.engine.renderer.get_tokenizer().decode
        seen = ["unheard_of" in decode(ids) for ids, _, _ in stack.engine.requests]
        assert seen == [False, True, True]
        assert stack.engine.requests[2][0][: len(stack.engine.requests[1][0])] == stack.engine.requests[1][0]

    stack.run(scenario)


def test_a_stop_string(stack):
    """What is kept is what the client got, and the next prompt continues it."""
    stack.engine.script = Script("one two three four")

    async def scenario(client):
        reply = await run_turn(client, 1, stop=["hre"])
        assert reply.json()["choices"][0]["message"]["content"] == "one two t"
        await run_turn(client, 2, "Go on.")
        prompt = stack.engine.renderer.get_tokenizer().decode(stack.engine.requests[1][0])
        assert "assistant\none two t<|im_end|>\n<|im_start|>user\nGo on." in prompt

    stack.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_one_turn_at_a_time(stack, stream):
    """While a turn runs, a second one is told to wait."""
    stack.engine.script = Script(pause_after=1)

    async def scenario(client):
        caller = Caller(stack.app, "POST", TURNS, [json.dumps(turn_body(1, stream=stream)).encode()])
        task = caller.start()
        await until(lambda: stack.engine.requests)
        error = error_of(await run_turn(client, 1))
        assert error.code == "turn_conflict"
        assert error.retry_after_s
        stack.engine.script.gate.set()
        await task
        assert (await state_of(client)).turn == 1

    stack.run(scenario)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("failure", "reason", "num_left"),
    [
        (httpx.ConnectError("refused"), "prefill_unavailable", 0),
        (httpx.ReadError("cut"), "prefill_unavailable", 2),
        (httpx.Response(200, json={"kv_transfer_params": {"bidikv": {"refusal": "forged"}}}), "read_failed", 0),
    ],
    ids=["not reached", "cut", "ticket refused as forged"],
)
def test_without_p_the_turn_is_computed_on_d(stack, failure, reason, num_left):
    """A failing P costs time only; its ticket comes back at once where it cannot be reading, else at its deadline."""

    async def scenario(client):
        await run_turn(client, 1)
        stack.p.answer = lambda body: failure
        info = info_of(await run_turn(client, 2))
        assert (info.turn, info.cache.reason, info.cache.outcome) == (2, reason, "recomputed")
        await settled()
        assert (await state_of(client)).pool.pending_ticket_blocks == num_left
        stack.engine.now_s = 1000.0
        assert (await state_of(client)).pool.pending_ticket_blocks == 0
        assert stack.num_pinned == 0

    stack.run(scenario)


FAILURES = {
    "broke": (RuntimeError("it broke"), "internal_error"),
    "dead": (EngineDeadError(), "engine_unavailable"),
    "refused": (ValueError("no such grammar"), "invalid_request"),
}


@pytest.mark.parametrize(("failure", "code"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("after", [0, 2])
def test_a_failing_engine_leaves_the_session_as_it_was(stack, failure, code, after):
    """The error has its code, the turn is not appended, and the same turn can run again."""

    async def scenario(client):
        before = info_of(await run_turn(client, 1))
        stack.engine.script = Script(fail_after=after, error=failure)
        error = error_of(await run_turn(client, 2, key="k"))
        assert error.code == code
        state = await state_of(client)
        assert (state.turn, state.lease) == (1, before.lease)
        assert state.pool.pending_ticket_blocks == 0
        assert [abandoned["return_ticket"] for abandoned in stack.engine.ops_named("abandon")] == [True]
        stack.engine.script = Script()
        assert info_of(await run_turn(client, 2, key="k")).turn == 2

    stack.run(scenario)


def test_a_reply_of_500_tells_nothing(stack):
    """What broke is in the log, under the request's id."""
    stack.engine.script = Script(fail_after=0, error=RuntimeError("a secret path"))

    async def scenario(client):
        reply = await client.post(TURNS, json=turn_body(1), headers={"X-Request-Id": "my id"})
        assert "a secret path" not in reply.text
        assert "my id" in error_of(reply).message

    stack.run(scenario)


def test_an_error_within_a_stream(stack):
    """What was said so far has been sent; an error event ends the stream, and nothing is appended."""
    stack.engine.script = Script(fail_after=2)

    async def scenario(client):
        *chunks, failed, done = events_of((await run_turn(client, 1, stream=True)).text)
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Hello there"
        assert ErrorInfo.from_json(failed["error"]).code == "internal_error"
        assert done == "[DONE]"
        state = await state_of(client)
        assert (state.turn, state.lease.state) == (0, "none")
        assert stack.num_pinned == 0
        stack.engine.script = Script()
        assert info_of(await run_turn(client, 1)).turn == 1

    stack.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("op", ["load", "begin", "settle"])
def test_a_control_call_that_fails(stack, op, stream):
    """The engine core is gone at any step: 503 (or an error event), and no turn is left open."""

    async def scenario(client):
        await run_turn(client, 1)
        if op == "load":  # which a turn needs only where the history may have changed
            await client.post("/v1/sessions/s/rewind", json={"turn": 1})
        stack.engine.fail_op = op
        reply = await run_turn(client, 2, stream=stream)
        if stream and op == "settle":
            *_, failed, done = events_of(reply.text)
            assert (ErrorInfo.from_json(failed["error"]).code, done) == ("engine_unavailable", "[DONE]")
        else:
            assert error_of(reply).code == "engine_unavailable"
        stack.engine.fail_op = ""
        await settled()
        assert (await state_of(client)).turn == 1
        assert info_of(await run_turn(client, 2)).turn == 2

    stack.run(scenario)


def test_a_begin_that_answers_too_late_is_undone(stack):
    """The caller got its 503; the turn that began after it does not stay open."""
    stack.configure(control_timeout_s=0.05)

    async def scenario(client):
        stack.engine.delay_op = "begin"
        assert error_of(await run_turn(client, 1)).code == "engine_unavailable"
        stack.engine.delay_op = ""
        stack.engine.delay.set()
        await settled()
        assert [abandoned["return_ticket"] for abandoned in stack.engine.ops_named("abandon")] == [True]
        assert info_of(await run_turn(client, 1)).turn == 1

    stack.run(scenario)


def test_a_settle_that_answers_too_late_is_found_by_the_retry(stack):
    """The turn was complete after all: the same turn with the same key gets its reply."""
    stack.configure(control_timeout_s=0.05)

    async def scenario(client):
        stack.engine.delay_op = "settle"
        assert error_of(await run_turn(client, 1, key="k")).code == "engine_unavailable"
        stack.engine.delay.set()
        await settled()
        reply = await run_turn(client, 1, key="k")
        # Abandoned before it was settled, or settled: never half of both.
        assert info_of(reply).turn == 1
        assert stack.engine.pool.pinned().total() == info_of(reply).lease.num_blocks

    stack.run(scenario)


# ---------------------------------------------------------------- clients that leave


def caller_of(stack, turn, **fields):
    """Return a client of a turn."""
    return Caller(stack.app, "POST", TURNS, [json.dumps(turn_body(turn, **fields)).encode()])


@pytest.mark.parametrize("num_messages", [1, 2, 4])
def test_a_client_that_leaves_its_stream(stack, num_messages):
    """After the headers or in the middle: the engine's request is aborted, nothing is appended, the lease stays."""

    async def scenario(client):
        before = info_of(await run_turn(client, 1))
        stack.engine.script = Script(pause_after=2)
        caller = caller_of(stack, 2, stream=True)
        task = caller.start()
        await caller.wait_for(num_messages)
        caller.leave()
        await task
        await settled()
        state = await state_of(client)
        assert (state.turn, state.lease, state.pool) == (1, before.lease, before.pool)
        stack.engine.script = Script()
        assert info_of(await run_turn(client, 2)).turn == 2

    stack.run(scenario)


def test_a_client_that_leaves_before_the_first_event(stack):
    """Regression: a stream that nobody began to read left its turn open until the turn's time was up."""

    async def scenario(client):
        await run_turn(client, 1)
        caller = caller_of(stack, 2, stream=True)

        async def send_nothing(message):
            raise OSError

        caller.replace_send(send_nothing)
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the server makes of it
            await caller.start()
        await settled()
        assert [abandoned["return_ticket"] for abandoned in stack.engine.ops_named("abandon")] == [True]
        assert info_of(await run_turn(client, 2)).turn == 2

    stack.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_p_computes(stack, stream):
    """P may be reading: the ticket stays until its deadline, all else is given back."""

    async def scenario(client):
        await run_turn(client, 1)
        stack.p.gate = asyncio.Event()
        caller = caller_of(stack, 2, stream=stream)
        task = caller.start()
        await until(lambda: len(stack.p.calls) == 2)
        caller.leave()
        await task
        await settled()
        assert [abandoned["return_ticket"] for abandoned in stack.engine.ops_named("abandon")] == [False]
        assert (await state_of(client)).pool.pending_ticket_blocks == 2
        stack.engine.now_s = 1000.0
        assert (await state_of(client)).pool.pending_ticket_blocks == 0
        assert stack.num_pinned == 0

    stack.run(scenario)


def test_a_client_that_leaves_while_d_generates(stack):
    """A turn without a stream is aborted as well, and its ticket is back: P had read."""

    async def scenario(client):
        before = info_of(await run_turn(client, 1))
        stack.engine.script = Script(pause_after=2)
        caller = caller_of(stack, 2)
        task = caller.start()
        await until(lambda: len(stack.engine.requests) == 2)
        caller.leave()
        await task
        await settled()
        assert stack.engine.num_aborted == 1
        state = await state_of(client)
        assert (state.turn, state.lease, state.pool) == (1, before.lease, before.pool)

    stack.run(scenario)


# ---------------------------------------------------------------- what is no call


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[1]", "list"),
        (b'"s"', "str"),
        (b"null", "NoneType"),
        (b'{"session_id": ' + b"[" * 100_000 + b"}", "nested too deeply"),
        (b'{"session_id": "\\ud800"}', "surrogates"),
        (b'{"session_id": 5}', "5"),
        (b"", "None"),
    ],
)
def test_a_body_that_is_none(stack, content, named):
    """Each is a 400 that says what is wrong with it."""

    async def scenario(client):
        for path in ("/v1/sessions", "/v1/sessions/s/turns"):
            error = error_of(await client.post(path, content=content))
            assert error.code == "invalid_request"
            if path == "/v1/sessions":
                assert named in error.message

    stack.run(scenario)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large(stack, monkeypatch, is_chunked):
    """Also where its length is not told beforehand."""
    monkeypatch.setattr(routes, "MAX_BODY_BYTES", 100)

    async def pieces():
        for _ in range(30):
            yield b"x" * 10

    async def scenario(client):
        error = error_of(await client.post(TURNS, content=pieces() if is_chunked else b"x" * 300))
        assert error.code == "request_too_large"
        assert "100 bytes" in error.message

    stack.run(scenario)


def test_a_request_id_comes_back(stack):
    """The caller's, or a new one, on good replies and on errors."""

    async def scenario(client):
        for path in (TURNS, "/v1/sessions/other/turns"):
            for body in (turn_body(1), turn_body(0)):
                reply = await client.post(path, json=body, headers={"X-Request-Id": "mine"})
                assert reply.headers["x-request-id"] == "mine"
        for bad in ("m\u00e4n".encode(), b"x" * 129, b"a\tb"):
            reply = await client.post(TURNS, json=turn_body(1), headers={b"X-Request-Id": bad})
            assert len(reply.headers["x-request-id"]) == 32
        minted = [(await client.get("/v1/sessions")).headers["x-request-id"] for _ in range(2)]
        assert minted[0] != minted[1]
        assert stack.p.calls

    stack.run(scenario)


def test_ids_that_differ_are_refused(stack):
    """Header, body and path name one session."""

    async def scenario(client):
        reply = await client.post(TURNS, json=turn_body(1), headers={"X-Session-ID": "t"})
        assert error_of(reply).param == "X-Session-ID"
        assert error_of(await client.post(TURNS, json=turn_body(1, session_id="t"))).param == "session_id"
        assert not stack.engine.ops

    stack.run(scenario)


def test_an_engine_that_is_no_home(stack):
    """On P every session route says that this is not the place, in the shape of all errors."""
    del stack.app.state.bidikv_conductor

    async def scenario(client):
        for method, path in (("POST", "/v1/sessions"), ("GET", "/v1/sessions"), ("POST", TURNS), ("GET", TURNS[:-6])):
            error = error_of(await client.request(method, path))
            assert error.code == "session_not_found"
            assert "decode node" in error.message

    stack.run(scenario)


def test_no_client_reaches_the_route_between_d_and_p(stack):
    """Without the secret's token it is not there."""

    async def scenario(client):
        for body in ({}, [], {"token_ids": [1]}):
            assert (await client.post("/bidikv/prefill", json=body)).status_code == 404

    stack.run(scenario)


def test_vllms_own_refusals_keep_their_words(stack):
    """An unknown model and a context that is too long have codes of their own; nothing was begun for them."""

    async def scenario(client):
        error = error_of(await run_turn(client, 1, model="gpt-0"))
        assert (error.code, error.param) == ("model_not_found", "model")
        error = error_of(await run_turn(client, 1, "word " * 3000))
        assert error.code == "context_length_exceeded"
        assert (await state_of(client)).turn == 0
        assert stack.num_pinned == 0

    stack.run(scenario)


# ---------------------------------------------------------------- pages


def test_the_list_comes_in_pages(stack):
    """By ids, each session once, and the last page says that it is the last."""

    async def scenario(client):
        for name in ("c", "a", "e", "b", "d"):
            await client.post("/v1/sessions", json={"session_id": name})
        whole = (await client.get("/v1/sessions")).json()
        assert (len(whole["data"]), whole["has_more"]) == (5, False)
        pages, after = [], {}
        while True:
            page = (await client.get("/v1/sessions", params={"limit": 2, **after})).json()
            pages.append([info["session"] for info in page["data"]])
            if not page["has_more"]:
                return pages
            after = {"after": pages[-1][-1]}

    assert stack.run(scenario) == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "²", "9" * 40])
def test_a_page_has_a_size(stack, limit):
    """A number that cannot be one is refused by name."""

    async def scenario(client):
        reply = await client.get("/v1/sessions", params={"limit": limit})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "limit")

    stack.run(scenario)
