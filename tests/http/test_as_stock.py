"""A turn of a session, on either route, gives what vLLM's own route gives: vLLM's serving is asked the same.

Here an engine that says what the test wants stands below vLLM's parsers; tests/engine compares what a model says.
"""

import pytest
from vllm.parser import abstract_parser as parsing

from .fakes import Script, events_of

CHAT = "/v1/chat/completions"
TURNS = "/v1/sessions/turns/turns"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": %d}}\n</tool_call>'
TWO_CALLS = "Let me see.\n" + CALL % 1 + "\n" + CALL % 2
THOUGHTS = "Here is my thought process: it is a greeting. Here is my response: Hello."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

# What the engine says, and what the caller asks for.
CASES = {
    "parallel tool calls": (TWO_CALLS, {"tools": TOOLS}),
    "one call at a time": (TWO_CALLS, {"tools": TOOLS, "parallel_tool_calls": False}),
    "no calls": (TWO_CALLS, {"tools": TOOLS, "tool_choice": "none"}),
    "a required call": (CALL % 1, {"tools": TOOLS, "tool_choice": "required"}),
    "a named call": (
        CALL % 1,
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}},
    ),
    "reasoning": (THOUGHTS, {}),
    "reasoning left out": (THOUGHTS, {"include_reasoning": False}),
    "reasoning and calls": (THOUGHTS + CALL % 1 + CALL % 2, {"tools": TOOLS}),
    "a schema": (
        '{"a": 1}',
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    ),
    "any object": ('{"a": 1}', {"response_format": {"type": "json_object"}}),
    "parameters": (
        "Hello there.",
        {"seed": 7, "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.3, "logit_bias": {"5": -1}, "stop": ["re"]},
    ),
    "few tokens": ("Hello there.", {"max_completion_tokens": 2}),
}

# So that the comparisons are of something: calls in the reply, and whether there are thoughts.
HAS = {
    "parallel tool calls": (2, False),
    "one call at a time": (1, False),
    "no calls": (0, False),
    "a required call": (1, False),
    "a named call": (1, False),
    "reasoning": (0, True),
    "reasoning left out": (0, False),
    "reasoning and calls": (2, True),
}


def said(reply, *, stream):
    """Return what a reply says: ids of tool calls and what tells of the cache are its own."""
    if not stream:
        (choice,) = reply.json()["choices"]
        calls = [{**call, "id": None} for call in choice["message"].get("tool_calls") or ()]
        usage = {**reply.json()["usage"], "prompt_tokens_details": None}
        return {**choice, "message": {**choice["message"], "tool_calls": calls}}, usage
    chunks = [event for event in events_of(reply.text) if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in choices:
        for call in choice["delta"].get("tool_calls") or ():
            call.pop("id", None)
    return choices, {**chunks[-1]["usage"], "prompt_tokens_details": None}


def asked_of_the_engine(stack):
    """Return the prompt and the sampling parameters of the last request, without what only we say to the engine."""
    prompt_ids, params, _ = stack.engine.requests[-1]
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return prompt_ids, {**fields, "extra_args": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_turn_is_what_stock_serving_gives(stack, case, stream):
    """The same reply on vLLM's route, with a session on it and on ours, from the same question to the engine."""
    text, fields = CASES[case]
    stack.configure(reasoning_parser="granite")
    stack.engine.script = Script(text)
    body = {"messages": HI, **fields, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}

    async def ask(client, path, **more):
        reply = await client.post(path, json={**body, **more})
        assert reply.status_code == 200, reply.text
        return said(reply, stream=stream), asked_of_the_engine(stack)

    async def ours(client):
        turn = {name: value for name, value in body.items() if name != "stream_options"}
        reply = await client.post(TURNS, json={**turn, "turn": 1})
        assert reply.status_code == 200, reply.text
        return await ask(client, CHAT, session_id="s"), (said(reply, stream=stream), asked_of_the_engine(stack))

    stock = stack.run(lambda client: ask(client, CHAT), app=stack.stock)
    for mine in stack.run(ours):
        assert mine == stock
    if case in HAS and not stream:
        message = stock[0][0]["message"]
        assert (len(message["tool_calls"]), message["reasoning"] is not None) == HAS[case]


def test_several_calls_are_continued_exactly(stack):
    """They come back from the client with their results, and stand for the ids that the model generated."""
    stack.engine.script = Script(TWO_CALLS)

    async def scenario(client):
        fields = {"tools": TOOLS, "session_id": "s"}
        message = (await client.post(CHAT, json={"messages": HI, **fields})).json()["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "a wall"} for call in message["tool_calls"]]
        assert len(results) == 2
        await client.post(CHAT, json={"messages": [*HI, message, *results], **fields})

    stack.run(scenario)
    (ids_1, *_), (ids_2, *_) = stack.engine.requests
    generated = stack.engine.renderer.get_tokenizer().encode(TWO_CALLS)
    assert ids_2[: len(ids_1) + len(generated)] == [*ids_1, *generated]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_the_whole_history_are_counted(stack, monkeypatch, stream):
    """Kimi's models number their calls through a conversation, and vLLM counts them in the request's messages."""
    counts, count = [], parsing.count_history_tool_calls
    monkeypatch.setattr(parsing, "get_tool_call_id_type", lambda _: "kimi_k2")
    monkeypatch.setattr(parsing, "count_history_tool_calls", lambda request: counts.append(count(request)) or 0)
    stack.engine.script = Script(TWO_CALLS)

    async def scenario(client):
        body = {"messages": HI, "tools": TOOLS, "stream": stream}
        assert (await client.post(TURNS, json={**body, "turn": 1})).status_code == 200
        body["messages"] = [{"role": "tool", "tool_call_id": "x", "content": "a wall"}]
        assert (await client.post(TURNS, json={**body, "turn": 2})).status_code == 200

    stack.run(scenario)
    assert counts == [0, 2]
