"""A turn's body: each refusal names the field, the value and the fix, and nothing but a refusal comes out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidikv_sdk.wire import ROUTES
from server_ext.http import turn_request
from server_ext.http.errors import Refused
from server_ext.http.turn_request import TurnRequest

HI = [{"role": "user", "content": "Hi"}]
GOOD = {"turn": 1, "messages": HI}


def parse(**fields):
    """Parse a body that is good but for these fields."""
    return TurnRequest.parse({**GOOD, **fields}, key="k")


def refusal(call):
    """Return what a call is refused with."""
    with pytest.raises(Refused) as refused:
        call()
    return refused.value.info


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_generation_prompt", False),
        ("cache_salt", "x"),
        ("cache_salt", ""),
        ("continue_final_message", True),
        ("ec_transfer_params", {}),
        ("echo", True),
        ("kv_transfer_params", {}),
        ("kv_transfer_params", {"do_remote_prefill": True}),
        ("n", 2),
        ("n", 0),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 3),
        ("truncate_prompt_tokens", 5),
        ("use_beam_search", True),
        ("vllm_xargs", {"a": 1}),
    ],
)
def test_what_a_session_cannot_do_is_refused_by_name(name, value):
    """Also with values that look empty: 0 prompt logprobs are some, and no generation prompt is another prompt."""
    info = refusal(lambda: parse(**{name: value}))
    assert (info.code, info.param) == ("unsupported_parameter", name)
    assert info.message.startswith(name)
    assert "leave it out" in info.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_generation_prompt", True),
        ("cache_salt", None),
        ("continue_final_message", False),
        ("echo", False),
        ("kv_transfer_params", None),
        ("n", 1),
        ("n", None),
        ("prompt_logprobs", None),
    ],
)
def test_a_value_that_means_nothing_passes(name, value):
    """Regression: a null `cache_salt` met the tenant's own, and the call ended as an internal error."""
    request = parse(**{name: value}).to_vllm(None, cache_salt="salt")
    assert request.cache_salt == "salt"
    assert request.add_generation_prompt
    assert not request.echo


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"turn": None}, "turn", "None"),
        ({"turn": 0}, "turn", "0"),
        ({"turn": True}, "turn", "True"),
        ({"turn": 1.0}, "turn", "1.0"),
        ({"turn": "1"}, "turn", "'1'"),
        ({"turn": 1 << 70}, "turn", str(1 << 70)),
        ({"messages": None}, "messages", "None"),
        ({"messages": []}, "messages", "[]"),
        ({"messages": "Hi"}, "messages", "'Hi'"),
        ({"messages": [*HI, 5]}, "messages[1]", "5"),
        ({"messages": [{"content": "Hi"}]}, "messages[0]", "role"),
        ({"messages": [{"role": 5}]}, "messages[0]", "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content", "{'a': 1}"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content", "text"),
        ({"tools": {}}, "tools", "{}"),
        ({"tools": ["weather"]}, "tools", "weather"),
        ({"stream": "yes"}, "stream", "'yes'"),
        ({"stream": 1}, "stream", "1"),
        ({"bidikv": []}, "bidikv", "[]"),
        ({"bidikv": None}, "bidikv", "None"),
        ({"bidikv": {"route": "teleport"}}, "bidikv.route", "'teleport'"),
        ({"bidikv": {"route": ["fetch"]}}, "bidikv.route", "fetch"),
        ({"bidikv": {"ttl_s": 0}}, "bidikv.ttl_s", "0"),
        ({"bidikv": {"ttl_s": -1.5}}, "bidikv.ttl_s", "-1.5"),
        ({"bidikv": {"ttl_s": "60"}}, "bidikv.ttl_s", "'60'"),
        ({"bidikv": {"ttl_s": True}}, "bidikv.ttl_s", "True"),
        ({"bidikv": {"ttl_s": float("nan")}}, "bidikv.ttl_s", "nan"),
        ({"bidikv": {"ttl_s": float("inf")}}, "bidikv.ttl_s", "inf"),
        ({"bidikv": {"ttl_s": 10**400}}, "bidikv.ttl_s", "1000"),
    ],
)
def test_a_bad_value_is_named(fields, param, named):
    """The text has the value, and says what to give."""
    info = refusal(lambda: parse(**fields))
    assert (info.code, info.param) == ("invalid_request", param)
    assert named in info.message
    assert "give" in info.message
    assert len(info.message) < 300


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "audio"}, {}, "text"])
def test_content_other_than_text_is_refused(part):
    """Sessions carry text only."""
    info = refusal(lambda: parse(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]))
    assert (info.code, info.param) == ("unsupported_parameter", "messages[0].content")


@pytest.mark.parametrize("protocol", [0, 2, "1", None, [1]])
def test_another_protocol_is_refused(protocol):
    """A client of another version is told which one is spoken here."""
    info = refusal(lambda: parse(bidikv={"protocol": protocol}))
    assert (info.code, info.param) == ("protocol_mismatch", "bidikv.protocol")
    assert "speaks protocol 1" in info.message


def test_defaults():
    """What is left out is the server's to choose."""
    request = parse()
    assert (request.route, request.ttl_s, request.tools, request.stream, request.chat) == (None, None, None, False, {})
    assert (request.turn, request.key, request.messages) == (1, "k", HI)


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_is_taken_as_it_is_asked_for(route):
    """Every way can be asked for, and `auto` too, whatever the server's setting says."""
    assert parse(bidikv={"protocol": 1, "route": route}).route == route


def test_chat_parameters_pass_through():
    """What is not ours goes to vLLM as it is, fields that vLLM does not know included."""
    request = parse(temperature=0.5, stop=["\n"], somebody_elses=1, stream=True, bidikv={"ttl_s": 30})
    assert request.chat == {"temperature": 0.5, "stop": ["\n"], "somebody_elses": 1}
    vllm_request = request.to_vllm([{"type": "function", "function": {"name": "f"}}], cache_salt=None)
    assert (vllm_request.temperature, vllm_request.stop, vllm_request.tools[0].function.name) == (0.5, ["\n"], "f")
    assert vllm_request.stream_options.include_usage
    assert request.ttl_s == 30.0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"tool_choice": "auto"}, "tools"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"structured_outputs": []}, "wrong type"),
    ],
)
def test_what_vllm_refuses_is_a_refusal(fields, named):
    """Regression: vLLM's own kind of error was not one of pydantic's, and ended as an internal error."""
    info = refusal(lambda: parse(**fields).to_vllm(None, cache_salt=None))
    assert info.code == "invalid_request"
    assert named in info.message


@pytest.mark.parametrize(
    ("path_id", "body", "header", "param"),
    [
        ("a", {"session_id": "b"}, None, "session_id"),
        ("a", {"session_id": 5}, None, "session_id"),
        ("a", {}, "b", "X-Session-ID"),
        ("", {}, None, "session_id"),
        ("a" * 257, {}, None, "session_id"),
    ],
)
def test_a_session_is_named_alike_everywhere(path_id, body, header, param):
    """Path, body and header agree, or the call is refused."""
    assert refusal(lambda: turn_request.session_id_of(path_id, body, header)).param == param


def test_a_session_id_is_taken_from_the_path():
    """The other two may be absent, or the same."""
    assert turn_request.session_id_of("a", {}, None) == "a"
    assert turn_request.session_id_of("a", {"session_id": "a"}, "a") == "a"


# ---------------------------------------------------------------- anything at all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "tool"]) | JSON, "content": JSON, "tool_calls": JSON}
    )
    | JSON,
    max_size=3,
)
NAMES = [
    "n", "stream", "tools", "tool_choice", "stop", "logprobs", "top_logprobs", "temperature", "max_tokens",
    "max_completion_tokens", "response_format", "structured_outputs", "logit_bias", "chat_template_kwargs", "documents",
    "reasoning_effort", "seed", "stream_options", "cache_salt", "prompt_logprobs", "bad_words", "mm_payload",
    "session_id", "priority", "min_tokens", "allowed_token_ids", "self", "cls", "parallel_tool_calls",
]  # fmt: skip
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "turn": st.just(1) | JSON,
        "messages": st.just(HI) | MESSAGES | JSON,
        "bidikv": JSON | st.fixed_dictionaries({}, optional={"protocol": JSON, "route": JSON, "ttl_s": JSON}),
        **dict.fromkeys(NAMES, JSON),
    },
)


@settings(max_examples=400, deadline=None)
@given(body=BODIES)
def test_nothing_but_a_refusal_comes_out(body):
    """Whatever JSON a body is, it is a turn or a refusal, also by the time that vLLM has looked at it."""
    try:
        request = TurnRequest.parse(body, key="k")
        request.to_vllm(request.tools, cache_salt=None)
    except Refused as refused:
        json.dumps(refused.info.to_json())


@settings(max_examples=200, deadline=None)
@given(messages=MESSAGES | JSON, tools=JSON, value=JSON, header=st.none() | st.text())
def test_the_other_readers_refuse_as_well(messages, tools, value, header):
    """So do the readers of single fields."""
    for call in (
        lambda: turn_request.messages_of({"messages": messages}, required=False),
        lambda: turn_request.tools_of({"tools": tools}),
        lambda: turn_request.ttl_of(value, "ttl_s"),
        lambda: turn_request.flag_of({"replace": value}, "replace"),
        lambda: turn_request.options_of({"bidikv": value}),
        lambda: turn_request.session_id_of("a", {"session_id": value}, header),
    ):
        try:
            call()
        except Refused as refused:  # noqa: PERF203
            json.dumps(refused.info.to_json())
