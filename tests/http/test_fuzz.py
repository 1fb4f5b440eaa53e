"""Whatever is sent to a route: an answer of the protocol, never an internal error, and nothing left behind."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bidikv_sdk.wire import ErrorInfo, SessionInfo

from .fakes import events_of, settled

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

FUZZ = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
NAMES = st.sampled_from(["s", "t", "a b", "\N{SNOWMAN}", "..", "x" * 300])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
CONTENT = st.text(max_size=20) | JSON | st.just([{"type": "text", "text": "part"}])
CALLS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "id": JSON,
            "type": st.just("function") | JSON,
            "function": JSON | st.fixed_dictionaries({}, optional={"name": JSON, "arguments": st.just("{}") | JSON}),
        },
    )
    | JSON,
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"])},
        optional={
            "content": CONTENT,
            "tool_calls": CALLS | JSON,
            "tool_call_id": JSON,
            "reasoning": JSON,
            "name": JSON,
            "function_call": JSON,
        },
    ),
    min_size=1,
    max_size=3,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": JSON}, optional={"parameters": JSON})}
    )
    | JSON,
    max_size=2,
)
CHAT = {
    "tools": TOOLS | JSON,
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | JSON,
    "stream": st.booleans(),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=2) | JSON,
    "max_completion_tokens": st.integers(-2, 3000) | JSON,
    "max_tokens": st.integers(-2, 3000) | JSON,
    "temperature": st.floats() | JSON,
    "logprobs": st.just(value=False),  # the scripted engine has none to give
    "top_logprobs": st.integers(-2, 30),
    "min_tokens": st.integers(-2, 3000),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "chat_template_kwargs": JSON | st.dictionaries(st.sampled_from(["tools", "messages", "tokenize", "x"]), JSON),
    "documents": JSON,
    "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object", "json_schema", "x"])}),
    "structured_outputs": JSON,
    "reasoning_effort": st.sampled_from(["low", "none", "x"]),
    "logit_bias": JSON,
    "allowed_token_ids": st.lists(st.integers(-5, 100_000), max_size=3) | JSON,
    "stop_token_ids": st.lists(st.integers(-5, 100_000), max_size=3) | JSON,
    "bad_words": JSON,
    "model": st.just("tiny") | JSON,
    "user": JSON,
    "request_id": JSON,
    "mm_processor_kwargs": JSON,
    "media_io_kwargs": JSON,
    "return_token_ids": st.booleans(),
    "priority": st.integers(),
    "truncation_side": st.sampled_from(["left", "x"]),
    "add_special_tokens": st.booleans(),
    "thinking_token_budget": JSON,
    "repetition_detection": JSON,
}
# Good but for one or two fields: nearly all of a wholly random body would be refused at the first one.
TURNS = st.tuples(
    st.fixed_dictionaries({"turn": st.integers(1, 2), "messages": MESSAGES}),
    st.lists(st.sampled_from(sorted(CHAT)).flatmap(lambda name: st.tuples(st.just(name), CHAT[name])), max_size=2),
).map(lambda parts: {**parts[0], **dict(parts[1])})
CONTROLS = st.fixed_dictionaries(
    {},
    optional={
        "session_id": NAMES | JSON,
        "messages": MESSAGES | JSON,
        "tools": TOOLS | JSON,
        "turn": st.integers(-1, 3) | JSON,
        "replace": st.booleans() | JSON,
        "ttl_s": st.floats() | st.integers() | JSON,
        "child_id": NAMES | JSON,
        "at_turn": st.integers(-1, 3) | JSON,
        "bidikv": JSON,
    },
)
BODIES = (TURNS | CONTROLS | JSON).map(json.dumps).map(str.encode) | st.binary(max_size=30)


def verify_answer(reply):
    """Verify that a reply is one of the protocol, and no internal error."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        *_, last, done = events_of(reply.text)
        assert done == "[DONE]"
        answer = last
    else:
        answer = reply.json()
    if "error" in answer:
        error = ErrorInfo.from_json(answer["error"])
        assert reply.status_code in (200, error.status)
        assert error.code not in ("internal_error", "engine_unavailable"), (reply.request.content, error)
    else:
        SessionInfo.from_json(answer["bidikv"])


@FUZZ
@given(calls=st.lists(TURNS, min_size=1, max_size=3))
def test_any_turn(stack, calls):
    """A turn runs or is refused, as long as its fields have the right names."""

    async def scenario(client):
        for body in calls:
            verify_answer(await client.post("/v1/sessions/s/turns", content=json.dumps(body)))
        await settled()
        listing = (await client.get("/v1/sessions")).json()["data"]
        await client.post("/v1/sessions/s/end")
        assert len(listing) <= 1
        assert stack.num_pinned == 0

    stack.run(scenario)


@FUZZ
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "",
                    "/{}/turns",
                    "/{}/extend",
                    "/{}/release",
                    "/{}/fork",
                    "/{}/rewind",
                    "/{}/end",
                ]
            ),
            NAMES,
            BODIES,
        ),
        max_size=4,
    )
)
def test_any_call(stack, calls):
    """So does any call of any route."""

    async def scenario(client):
        for verb, name, body in calls:
            reply = await client.post(f"/v1/sessions{verb.format(name)}", content=body)
            if reply.status_code in (404, 405) and "error" not in reply.json():
                continue  # the web framework's own: no such path
            if b"kv_transfer_params" not in body:
                verify_answer(reply)
        assert (await client.get("/v1/sessions")).status_code == 200

    stack.run(scenario)


@FUZZ
@given(calls=st.lists(TURNS, min_size=1, max_size=3))
def test_any_chat_completion(stack, calls):
    """With a session or without, a chat completion is answered or refused alike."""
    bodies = [{name: value for name, value in body.items() if name != "turn"} for body in calls]

    async def scenario(client, **fields):
        for body in bodies:
            reply = await client.post("/v1/chat/completions", content=json.dumps({**body, **fields}))
            yield reply.status_code, "error" in reply.text.partition("choices")[0]

    async def collected(client, **fields):
        return [answer async for answer in scenario(client, **fields)]

    plain = stack.run(collected)
    assert stack.run(lambda client: collected(client, session_id="s")) == plain
    stack.engine.home.sweep(now_s=1e9)
    assert stack.num_pinned == 0
