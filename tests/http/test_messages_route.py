"""Anthropic's clients: a session id and the whole history on vLLM's own messages route."""

import asyncio
import json

import pytest

from server_ext.http import messages_route

from .fakes import Caller, Script, settled, until

MESSAGES = "/v1/messages"
TOOLS = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


def body(*messages, **fields):
    """Return the body of a request whose messages are a user's and an assistant's in turn."""
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": content} for i, content in enumerate(messages)]
    return {"model": "tiny", "max_tokens": 64, "messages": said, **fields}


def usage_of(reply, *, stream):
    """Return a reply's usage."""
    if not stream:
        return reply.json()["usage"]
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: {")]
    return next(event["usage"] for event in reversed(events) if "usage" in event)


async def info(client, session_id="s"):
    """Return what the server knows of a session."""
    return (await client.get(f"/v1/sessions/{session_id}")).json()["bidikv"]


@pytest.mark.parametrize("named", [{"json": {"session_id": "s"}}, {"headers": {"X-Session-ID": "s"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_history_continues_the_sessions_own_ids(stack, stream, named):
    """The second request fetches all that the first one left, and tells it as cache that was read."""

    async def scenario(client):
        headers, fields = named.get("headers"), {**named.get("json", {}), "stream": stream, "system": "Be terse."}
        first = await client.post(MESSAGES, json=body("Hi", **fields), headers=headers)
        assert first.status_code == 200, first.text
        assert usage_of(first, stream=stream).get("cache_read_input_tokens") == 0
        second = await client.post(MESSAGES, json=body("Hi", "Hello there.", "More", **fields), headers=headers)
        (ids_1, _, _), (ids_2, _, _) = stack.engine.requests
        said = stack.engine.renderer.get_tokenizer().encode("Hello there.")
        assert ids_2[: len(ids_1) + len(said)] == [*ids_1, *said]
        usage = usage_of(second, stream=stream)
        assert usage["cache_read_input_tokens"] == len(ids_1) + len(said)
        assert usage["cache_read_input_tokens"] + usage["input_tokens"] == len(ids_2)
        assert ((await info(client))["turn"], (await info(client))["lease"]["state"]) == (2, "active")

    stack.run(scenario)


def test_a_tool_call_comes_back_as_what_the_model_said(stack):
    """A tool_use block and its result continue the ids that the model generated for the call."""

    async def scenario(client):
        stack.engine.script = Script(CALL)
        fields = {"session_id": "s", "tools": TOOLS}
        first = (await client.post(MESSAGES, json=body("Hi", **fields))).json()
        assert first["stop_reason"] == "tool_use", first
        use = first["content"][-1]
        result = [{"type": "tool_result", "tool_use_id": use["id"], "content": "a wall"}]
        stack.engine.script = Script()
        await client.post(MESSAGES, json=body("Hi", first["content"], result, **fields))
        (ids_1, _, _), (ids_2, _, _) = stack.engine.requests
        said = stack.engine.renderer.get_tokenizer().encode(CALL)
        assert ids_2[: len(ids_1) + len(said)] == [*ids_1, *said]
        assert (await info(client))["turn"] == 2

    stack.run(scenario)


def test_options_of_ours_are_heeded(stack):
    """The transport of stock clients says them here too; where they are wrong, there is no session."""

    async def scenario(client):
        await client.post(MESSAGES, json=body("Hi", session_id="s", bidikv={"ttl_s": 5}))
        assert (await info(client))["lease"]["remaining_s"] == 5
        reply = await client.post(MESSAGES, json=body("Hi", session_id="s", bidikv={"route": "warp"}))
        assert (reply.status_code, (await info(client))["turn"]) == (200, 1)

    stack.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_changes_no_answer(stack, stream):
    """With a session and without one, here and at stock vLLM, the reply is the same but for the cache that it tells."""

    async def scenario(client):
        replies = [await client.post(MESSAGES, json=body("Hi", stream=stream, **f)) for f in ({}, {"session_id": "s"})]
        assert all(reply.status_code == 200 for reply in replies)
        return [reply.text.replace(',"cache_read_input_tokens":0', "") for reply in replies]

    async def stock(client):
        return (await client.post(MESSAGES, json=body("Hi", stream=stream))).text

    def parts(text):
        if not stream:
            # The engine's word to routers reaches nobody within a session.
            return [{**json.loads(text), "id": None, "kv_transfer_params": None}]
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        said = [json.loads(line) for line in lines]
        return [{**part, "message": {**part["message"], "id": None}} if "message" in part else part for part in said]

    plain, session = stack.run(scenario)
    assert parts(plain) == parts(session) == parts(stack.run(stock, app=stack.stock))


def test_what_a_session_cannot_serve_goes_vllms_way(stack):
    """While a turn of the session runs, and where the home does not answer, vLLM serves the message."""
    stack.engine.script = Script(pause_after=1)

    async def scenario(client):
        first = asyncio.ensure_future(client.post(MESSAGES, json=body("Hi", session_id="s")))
        await until(lambda: len(stack.engine.requests) == 1)
        gate = stack.engine.script.gate
        stack.engine.script = Script("As stock.")
        second = await client.post(MESSAGES, json=body("Hi", session_id="s"))
        assert second.json()["content"][0]["text"] == "As stock."
        gate.set()
        assert (await first).status_code == 200
        assert (await info(client))["turn"] == 1
        stack.engine.fail_op = "begin"
        third = await client.post(MESSAGES, json=body("Hi", session_id="s"))
        assert third.json()["content"][0]["text"] == "As stock."

    stack.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_turn(stack, stream):
    """The engine's request is aborted, and the session is as before."""
    stack.engine.script = Script(pause_after=2)

    async def scenario(client):
        request = json.dumps(body("Hi", session_id="s", stream=stream)).encode()
        caller = Caller(stack.app, "POST", MESSAGES, [request])
        call = caller.start()
        await until(lambda: len(stack.engine.requests) == 1)
        await settled()
        caller.leave()
        await call
        await until(lambda: stack.engine.num_aborted == 1)
        await settled()
        assert (await info(client))["turn"] == 0
        assert stack.num_pinned == 0

    stack.run(scenario)


def test_a_server_without_messages_stays_without(stack):
    """Where vLLM serves no messages there is nothing to add to."""
    stack.app.state.anthropic_serving_messages = None
    messages_route.attach(stack.app.state)
    assert stack.app.state.anthropic_serving_messages is None
