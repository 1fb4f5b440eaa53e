"""Any OpenAI client: a session id and the whole history on vLLM's own chat route."""

import asyncio
import json

import pytest
from fastapi import FastAPI

from bidikv_sdk.wire import SessionInfo
from server_ext.http import chat_route

from .fakes import Caller, Script, events_of, settled, ticket_of, turn_body, until

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def user(text):
    """Return a user's message."""
    return {"role": "user", "content": text}


class Conversation:
    """A client with its whole history, as the stock clients keep it."""

    def __init__(self, client, session_id="s", *, messages=(), **fields):
        self.client = client
        self.messages = list(messages)
        self.fields = {"session_id": session_id, **fields}

    async def say(self, text, *, stream=False, **fields):
        """Send the history with one more message, and take the reply into it; return what came."""
        self.messages.append(user(text))
        body = {"messages": self.messages, "stream": stream, **self.fields, **fields}
        reply = await self.client.post(CHAT, json=body)
        assert reply.status_code == 200, reply.text
        if stream:
            chunks = events_of(reply.text)[:-1]
            text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
            self.messages.append({"role": "assistant", "content": text})
            return chunks[-1]
        self.messages.append(reply.json()["choices"][0]["message"])
        return reply.json()


def info_of(reply):
    """Return the `bidikv` object of a reply."""
    return SessionInfo.from_json(reply["bidikv"])


def came(reply):
    """Return outcome and reason."""
    cache = info_of(reply).cache
    return cache.outcome, cache.reason


def without_time(text):
    """Return a reply without the second in which it was made."""
    parts = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part and "[DONE]" not in part]
    return [{name: value for name, value in part.items() if name != "created"} for part in parts]


# ---------------------------------------------------------------- with a session


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_history_continues_the_sessions_own_ids(stack, stream):
    """The second request fetches all that the first one left, and its prompt begins with what D generated."""

    async def scenario(client):
        talk = Conversation(client)
        first = await talk.say("Hi", stream=stream)
        assert came(first) == ("recomputed", "first_turn")
        second = await talk.say("More", stream=stream)
        (ids_1, _, nonce_1), (ids_2, _, nonce_2) = stack.engine.requests
        said = stack.engine.renderer.get_tokenizer().encode("Hello there.")
        assert ids_2[: len(ids_1) + len(said)] == [*ids_1, *said]
        assert ticket_of(stack.p.calls[1])["remote_num_tokens"] == len(ids_1) + len(said)
        info = info_of(second)
        assert (info.session, info.turn, info.lease.state) == ("s", 2, "active")
        assert came(second) == ("fetched", "cheapest")
        assert info.cache.fetched_tokens == len(ids_1) + len(said)
        assert info.cache.diverged_at is None
        assert nonce_1 != nonce_2

    stack.run(scenario)


def test_what_was_not_computed_is_told_in_the_usage(stack):
    """`cached_tokens` is what was reused and fetched, on both routes, streamed or not."""

    async def scenario(client):
        talk = Conversation(client)
        await talk.say("Hi")
        body = turn_body(2)
        for stream in (False, True):
            replies = [
                await talk.say("More", stream=stream, stream_options={"include_usage": True} if stream else None)
            ]
            body["turn"] = info_of(replies[0]).turn + 1
            turn = await client.post("/v1/sessions/s/turns", json={**body, "stream": stream})
            replies.append(events_of(turn.text)[-2] if stream else turn.json())
            for reply in replies:
                cache = info_of(reply).cache
                assert reply["usage"]["prompt_tokens"] == cache.prompt_tokens
                cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == cache.reused_tokens + cache.fetched_tokens > 0
            talk = Conversation(client)  # its history lacks the other route's turn
            await talk.say("Hi")

    stack.run(scenario)


@pytest.mark.parametrize(
    ("body", "headers", "is_found"),
    [
        ({"session_id": "s"}, {}, True),
        ({}, {"X-Session-ID": "s"}, True),
        ({"vllm_xargs": {"session_id": "s"}}, {}, True),
        ({"session_id": "s", "vllm_xargs": {"session_id": "x"}}, {"X-Session-ID": "y"}, True),
        ({"vllm_xargs": {"session_id": "x"}}, {"X-Session-ID": "s"}, True),
        ({"conversation_id": "s"}, {"X-Correlation-ID": "x"}, True),
        ({}, {"X-Correlation-ID": "s"}, True),
        ({"session_id": "s" * 300}, {}, False),
        ({"conversation_id": ["s"]}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_session_is_named_in_many_places(stack, body, headers, is_found):
    """VLLM's own places in its order, then the aliases of the settings; what cannot be an id is none."""
    stack.configure(session_id_fields=("conversation_id",), session_id_headers=("X-Correlation-ID",))

    async def scenario(client):
        reply = await client.post(CHAT, json={"messages": [user("Hi")], **body}, headers=headers)
        assert reply.status_code == 200
        assert [info["session"] for info in (await client.get("/v1/sessions")).json()["data"]] == ["s"] * is_found
        assert ("bidikv" in reply.json()) == is_found

    stack.run(scenario)


def test_aliases_are_off_until_they_are_set(stack):
    """An id that some proxy mints for each request must not open a session each time."""

    async def scenario(client):
        body = {"messages": [user("Hi")], "conversation_id": "s"}
        await client.post(CHAT, json=body, headers={"X-Correlation-ID": "s"})
        assert stack.engine.ops == []

    stack.run(scenario)


@pytest.mark.parametrize("wants_usage", [False, True])
def test_a_stream_has_the_chunks_that_its_client_expects(stack, wants_usage):
    """A chunk without choices comes to those only who asked for usage; the report lies in the last chunk."""

    async def scenario(client):
        options = {"stream_options": {"include_usage": True}} if wants_usage else {}
        body = {"messages": [user("Hi")], "session_id": "s", "stream": True, **options}
        *chunks, done = events_of((await client.post(CHAT, json=body)).text)
        assert done == "[DONE]"
        plain = {**body, "session_id": None}
        *stock, _ = events_of((await client.post(CHAT, json=plain)).text)
        assert [len(chunk["choices"]) for chunk in chunks] == [len(chunk["choices"]) for chunk in stock]
        assert [chunk.get("choices") for chunk in chunks] == [chunk.get("choices") for chunk in stock]
        assert [chunk.keys() - {"bidikv"} for chunk in chunks] == [chunk.keys() for chunk in stock]
        assert ["bidikv" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert info_of(chunks[-1]).turn == 1

    stack.run(scenario)


def test_fields_that_say_nothing_do_not_matter(stack):
    """Clients send a reply back with empty fields, without them, or with arguments written in another way."""
    stack.engine.script = Script('<tool_call>\n{"name": "look",  "arguments": {"a":  1}}\n</tool_call>')

    async def scenario(client):
        talk = Conversation(client, tools=TOOLS)
        await talk.say("Look.")
        (call,) = talk.messages[-1]["tool_calls"]
        arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=3)
        call = {"type": "function", "id": call["id"], "index": 0, "function": {"name": "look", "arguments": arguments}}
        talk.messages[-1] = {"role": "assistant", "refusal": None, "tool_calls": [call]}
        talk.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "Sun."})
        reply = await talk.say("And now?")
        (ids_1, *_), (ids_2, *_) = stack.engine.requests
        assert came(reply) == ("fetched", "cheapest")
        assert info_of(reply).cache.diverged_at is None
        said = stack.engine.renderer.get_tokenizer().encode(stack.engine.script.text)
        assert ids_2[: len(ids_1) + len(said)] == [*ids_1, *said]

    stack.run(scenario)


def edit_last(messages):
    """Change what the assistant said last."""
    messages[-1] = {"role": "assistant", "content": "Something else."}


def drop_last(messages):
    """Take the last turn back."""
    del messages[-2:]


def edit_system(messages):
    """Change the system prompt."""
    messages[0] = {"role": "system", "content": "Be verbose."}


def edit_first(messages):
    """Change what the user said first."""
    messages[1] = user("Howdy")


def compact(messages):
    """Sum the beginning up."""
    messages[1:-2] = [user("A summary of all that went before.")]


@pytest.mark.parametrize(
    ("change", "reason", "turn"),
    [
        (edit_last, "messages_changed", 2),
        (drop_last, "messages_changed", 2),
        (edit_system, "system_changed", 1),
        (edit_first, "messages_changed", 1),
        (compact, "messages_changed", 1),
    ],
)
def test_an_edited_history_uses_what_still_matches(stack, change, reason, turn):
    """The session goes on behind the last turn that is as it was; the rest is new, and the report says why."""

    async def scenario(client):
        talk = Conversation(client, messages=[{"role": "system", "content": "Be terse."}])
        await talk.say("Hi")
        await talk.say("More")
        change(talk.messages)
        reply = await talk.say("Now this.")
        info = info_of(reply)
        assert (info.turn, info.cache.reason) == (turn, reason)
        assert info.cache.outcome == "fetched"
        assert 0 < info.cache.diverged_at == info.cache.fetched_tokens < info.cache.held_tokens
        prompt = stack.engine.renderer.get_tokenizer().decode(stack.engine.requests[-1][0])
        place = 0
        for message in talk.messages[:-1]:
            place = prompt.index(message["content"], place)
        # And goes on from there, exactly.
        assert came(await talk.say("On.")) == ("fetched", "cheapest")

    stack.run(scenario)


def test_the_same_message_again_is_answered_anew(stack):
    """A client that wants another answer to its last message gets it from the whole lease; the old answer is gone."""

    async def scenario(client):
        talk = Conversation(client)
        await talk.say("Hi")
        await talk.say("More")
        del talk.messages[-2:]
        reply = await talk.say("More")
        assert came(reply) == ("fetched", "cheapest")
        assert stack.engine.requests[1][0] == stack.engine.requests[2][0]
        assert info_of(reply).turn == 2

    stack.run(scenario)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_changed_tools_are_told(stack, tools):
    """A request has the tools that it names, and none where it names none."""

    async def scenario(client):
        talk = Conversation(client)
        await talk.say("Hi", tools=[{"type": "function", "function": {"name": "other", "parameters": {}}}])
        reply = await talk.say("More", **({} if tools is None else {"tools": tools}))
        assert came(reply)[1] == "tools_changed"
        prompt = stack.engine.renderer.get_tokenizer().decode(stack.engine.requests[-1][0])
        assert "other" not in prompt
        assert ("look" in prompt) == bool(tools)

    stack.run(scenario)


def test_both_routes_lead_to_one_session(stack):
    """A turn of the session routes goes on where a chat completion ended, and the other way round."""

    async def scenario(client):
        talk = Conversation(client)
        await talk.say("Hi")
        reply = await client.post("/v1/sessions/s/turns", json=turn_body(2, "More"))
        assert came(reply.json()) == ("fetched", "cheapest")
        talk.messages += [user("More"), reply.json()["choices"][0]["message"]]
        reply = await talk.say("On.")
        assert came(reply) == ("fetched", "cheapest")
        assert info_of(reply).turn == 3

    stack.run(scenario)


def test_options_of_ours_are_heeded(stack):
    """Who knows of bidikv may say how long the lease lives and which way the turn goes, and hears of mistakes."""

    async def scenario(client):
        talk = Conversation(client)
        reply = await talk.say("Hi", bidikv={"ttl_s": 5, "route": "recompute"})
        assert info_of(reply).lease.remaining_s == 5
        assert came(reply)[1] == "forced"
        body = {"messages": [user("Hi")], "session_id": "s", "bidikv": {"route": "warp"}}
        reply = await client.post(CHAT, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "bidikv.route")

    stack.run(scenario)


# ---------------------------------------------------------------- without one


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}}, {"tools": TOOLS, "seed": 7}])
def test_without_a_session_nothing_changes(stack, stream, fields):
    """The reply is vLLM's own, byte for byte, and the home is not asked."""
    if not stream:
        fields = {name: value for name, value in fields.items() if name != "stream_options"}
    body = {"messages": [user("Hi")], "stream": stream, "request_id": "r", **fields}

    async def scenario(client):
        return await client.post(CHAT, json=body)

    ours, stock = stack.run(scenario), stack.run(scenario, app=stack.stock)
    assert without_time(ours.text) == without_time(stock.text)
    assert list(ours.headers.items()) == list(stock.headers.items())
    assert len(ours.content) == len(stock.content)
    assert stack.engine.ops == []


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"messages": 5}', b'{"messages": [], "session_id": 7}'])
def test_a_bad_body_is_vllms_to_refuse(stack, content):
    """What is no chat completion gets vLLM's own answer."""

    async def scenario(client):
        return await client.post(CHAT, content=content, headers={"content-type": "application/json"})

    ours, stock = stack.run(scenario), stack.run(scenario, app=stack.stock)
    assert (ours.status_code, ours.text) == (stock.status_code, stock.text)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "gpt-0"},
        {"max_tokens": 5000},
        {"cache_salt": "salt"},
        {"vllm_xargs": {"session_id": "s", "other": 1}},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_what_a_session_cannot_serve_goes_vllms_way(stack, fields):
    """The answer, or the error, is that of the same request without a session; nothing is left behind."""
    body = {"messages": [user("Hi")], "session_id": "s", "request_id": "r", **fields}

    async def scenario(client):
        return await client.post(CHAT, json=body)

    ours, stock = stack.run(scenario), stack.run(scenario, app=stack.stock)
    assert (ours.status_code, without_time(ours.text)) == (stock.status_code, without_time(stock.text))
    assert stack.engine.ops_named("settle") == []
    assert stack.num_pinned == 0


@pytest.mark.parametrize("op", ["load", "begin"])
def test_a_home_that_does_not_answer_costs_the_lease_only(stack, op):
    """The request is served as stock serves it."""
    stack.engine.fail_op = op

    async def scenario(client):
        reply = await client.post(CHAT, json={"messages": [user("Hi")], "session_id": "s"})
        assert reply.json()["choices"][0]["message"]["content"] == "Hello there."
        assert "bidikv" not in reply.json()

    stack.run(scenario)


@pytest.mark.parametrize("wants_usage", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_kept_is_given_all_the_same(stack, stream, wants_usage):
    """Where settling fails the client has its answer; the session is as before, and nothing stays pinned."""
    stack.engine.fail_op = "settle"

    async def scenario(client):
        body = {"messages": [user("Hi")], "session_id": "s", "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": wants_usage}
        reply = await client.post(CHAT, json=body)
        assert reply.status_code == 200
        assert "bidikv" not in reply.text
        assert "error" not in reply.text
        if stream:
            *chunks, _ = events_of(reply.text)
            reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c.get("finish_reason")]
            assert reasons == ["stop"]
            assert (chunks[-1].get("usage") is not None) == wants_usage
        await settled()
        assert (await client.get("/v1/sessions/s")).json()["bidikv"]["turn"] == 0
        assert stack.num_pinned == 0

    stack.run(scenario)


def test_beside_a_running_turn_a_request_is_served_without_its_session(stack):
    """Never an error, never a wait: the second one gets stock's answer, and the first one its lease."""
    stack.engine.script = Script(pause_after=1)

    async def scenario(client):
        body = {"messages": [user("Hi")], "session_id": "s"}
        first = asyncio.ensure_future(client.post(CHAT, json=body))
        await until(lambda: len(stack.engine.requests) == 1)
        gate = stack.engine.script.gate
        stack.engine.script = Script("As stock.")
        second = await client.post(CHAT, json=body)
        assert second.json()["choices"][0]["message"]["content"] == "As stock."
        assert "bidikv" not in second.json()
        assert len(stack.p.calls) == 1
        gate.set()
        assert info_of((await first).json()).turn == 1

    stack.run(scenario)


def test_a_history_that_changed_meanwhile_is_not_appended_to(stack):
    """A request that was rendered from an older history than the home's is served without the session."""
    stack.engine.delay_op = "begin"

    async def scenario(client):
        late = asyncio.ensure_future(client.post(CHAT, json={"messages": [user("Late")], "session_id": "s"}))
        await until(lambda: stack.engine.num_delayed == 1)
        opened = {"session_id": "s", "messages": [user("a"), user("b")], "replace": True}
        await client.post("/v1/sessions", json=opened)
        stack.engine.delay.set()
        assert "bidikv" not in (await late).json()
        assert (await client.get("/v1/sessions/s")).json()["bidikv"]["turn"] == 0

    stack.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_turn(stack, stream):
    """The engine's request is aborted, and the session is as before."""
    stack.engine.script = Script(pause_after=2)

    async def scenario(client):
        body = {"messages": [user("Hi")], "session_id": "s", "stream": stream}
        caller = Caller(stack.app, "POST", CHAT, [json.dumps(body).encode()])
        call = caller.start()
        await until(lambda: len(stack.engine.requests) == 1)
        await settled()
        caller.leave()
        await call
        await until(lambda: stack.engine.num_aborted == 1)
        await settled()
        assert (await client.get("/v1/sessions/s")).json()["bidikv"]["turn"] == 0
        assert stack.num_pinned == 0

    stack.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_breaks(stack, stream):
    """The error is vLLM's own; nothing stays pinned."""
    stack.engine.script = Script(fail_after=2, error=ValueError("the engine broke"))

    async def scenario(client):
        body = {"messages": [user("Hi")], "session_id": "s", "stream": stream}
        if not stream:
            reply = await client.post(CHAT, json=body)
            assert (reply.status_code, reply.json()["error"]["message"]) == (400, "the engine broke")
        else:
            text = (await client.post(CHAT, json=body)).text
            assert "the engine broke" in text
            assert text.endswith("data: [DONE]\n\n")
        await settled()
        assert stack.num_pinned == 0

    stack.run(scenario)


def test_an_engine_that_is_no_home_serves_as_stock(stack):
    """On P the route is vLLM's."""
    del stack.app.state.bidikv_conductor

    async def scenario(client):
        reply = await client.post(CHAT, json={"messages": [user("Hi")], "session_id": "s"})
        assert reply.status_code == 200
        assert "bidikv" not in reply.json()

    stack.run(scenario)


def test_without_vllms_route_nothing_is_attached():
    """There is nothing to replace where vLLM serves no chat."""
    app = FastAPI()
    num_routes = len(app.routes)
    chat_route.attach(app)
    assert len(app.routes) == num_routes
