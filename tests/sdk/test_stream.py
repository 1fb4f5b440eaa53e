"""Streaming turns: decoding, adding up, and every way in which a stream can end."""

import itertools
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bidikv_sdk
from bidikv_sdk._stream import EventDecoder
from bidikv_sdk.chunks import ChunkSum

pytestmark = pytest.mark.anyio

CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/"}'}},
    {"id": "c2", "type": "function", "function": {"name": "rm", "arguments": '{"path": "/x"}'}},
]


# ---------------------------------------------------------------- events


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1)),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(0, 200), max_size=5),
)
def test_events_come_out_however_the_bytes_are_cut(events, newline, cuts):
    """Any cut of the bytes, also inside a character, gives the same events; U+2028 does not split one."""
    body = "".join(f": ping{newline}event: x{newline}data: {data}{newline}{newline}" for data in events).encode()
    places = sorted({0, *(cut % (len(body) + 1) for cut in cuts), len(body)})
    decoder = EventDecoder()
    got = [data.decode() for start, stop in itertools.pairwise(places) for data in decoder.feed(body[start:stop])]
    assert got == events


def test_events_may_have_several_lines_and_comments():
    """Data lines of one event are joined; comments, other fields and empty events say nothing."""
    body = b": hello\n\nid: 7\n\ndata:a\ndata: b\nretry: 3\n\ndata\n\ndata: [DONE]\n\ndata: cut"
    assert EventDecoder().feed(body) == [b"a\nb", b"", b"[DONE]"]


def test_chunks_add_up_to_a_completion():
    """Text, other streamed text, tool calls, log-probabilities, reason and usage all arrive."""
    total = ChunkSum()
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    call = {"index": 1, "id": "c2", "type": "function", "function": {"name": "rm", "arguments": ""}}
    other = {"index": 0, "id": "c1", "function": {"name": "ls", "arguments": None}}
    for delta, more in [
        ({"role": "assistant", "content": "", "tool_calls": None}, {}),
        ({"reasoning": "so "}, {}),
        ({"reasoning": "what", "refusal": None}, {}),
        ({"content": "a"}, {"logprobs": {"content": [1]}}),
        ({"content": "b"}, {"logprobs": {"content": [2], "refusal": None}}),
        ({"tool_calls": [call]}, {}),
        ({"tool_calls": [other, {"index": 1, "function": {"arguments": "{}"}}], "extra": 7}, {}),
        ({}, {"finish_reason": "tool_calls", "logprobs": None}),
    ]:
        total.add({**head, "choices": [{"index": 0, "delta": delta, **more}]})
    total.add({**head, "choices": [], "usage": {"total_tokens": 3}, "bidikv": {"turn": 1}})
    assert total.text == "ab"
    assert total.completion() == {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "usage": {"total_tokens": 3},
        "bidikv": {"turn": 1},
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls",
                "logprobs": {"content": [1, 2], "refusal": []},
                "message": {
                    "role": "assistant",
                    "content": "ab",
                    "reasoning": "so what",
                    "extra": 7,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": ""}},
                        {"id": "c2", "type": "function", "function": {"name": "rm", "arguments": "{}"}},
                    ],
                },
            }
        ],
    }


# ---------------------------------------------------------------- turns


async def test_a_stream_gives_the_text_and_then_the_turn(client, server):
    """The pieces arrive in order; the final turn is what a call without streaming returns."""
    session = client.session("s")
    server.reply("one two three")
    async with session.stream("Go", route="local", ttl_s=9, temperature=0) as stream:
        pieces = [text async for text in stream.text_stream]
        turn = await stream.final_turn()
    assert pieces == ["one", " two", " three"]
    assert (turn.text, turn.turn, turn.finish_reason) == ("one two three", 1, "stop")
    assert turn.lease.remaining_s == 9
    assert turn.request_id == server.requests[0].headers["x-request-id"]
    assert server.requests[0].body["stream"] is True
    assert session.transcript == server.messages("s")
    server.forget()
    server.reply("one two three")
    same = await client.session("s").send("Go", ttl_s=9)
    for name in ("id", "object", "model", "bidikv"):
        assert same.completion[name] == turn.completion[name]
    assert turn.completion["usage"].items() <= same.completion["usage"].items()
    assert same.message == turn.message


async def test_the_chunks_can_be_read_themselves(client, server):
    """Iterating the stream gives the chunks as JSON; the last one carries `bidikv` and ends the iteration."""
    server.reply(tool_calls=CALLS)
    async with client.session().stream("Go") as stream:
        chunks = [chunk async for chunk in stream]
        assert [chunk async for chunk in stream] == []
        turn = await stream.final_turn()
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["bidikv"]["turn"] == 1
    assert turn.tool_calls == CALLS
    assert turn.finish_reason == "tool_calls"


async def test_final_turn_alone_reads_the_whole_stream(client):
    """Nothing needs to be read before, and the turn stays readable after the block."""
    async with client.session().stream("Go on") as stream:
        assert (await stream.final_turn()).text == "Go on"
    assert (await stream.final_turn()).text == "Go on"


async def test_leaving_early_aborts_the_turn(client, server):
    """The connection is closed, the turn is nowhere, and the next send works as the same turn number."""
    session = client.session()
    async with session.stream("one two three") as stream:
        async for _ in stream.text_stream:
            break
    assert server.info(session.id).turn == 0
    assert session.transcript == []
    with pytest.raises(bidikv_sdk.StreamClosed, match=r"with session\.stream"):
        await stream.final_turn()
    await stream.close()
    turn = await session.send("again")
    assert (turn.turn, turn.reopened) == (1, False)


async def test_a_stream_must_be_entered(client, server):
    """A stream that was not entered sent nothing; reading it is misuse, and the session is not busy."""
    session = client.session()
    stream = session.stream("Go")
    with pytest.raises(bidikv_sdk.StreamClosed):
        await stream.final_turn()
    with pytest.raises(bidikv_sdk.StreamClosed):
        [chunk async for chunk in stream]
    assert server.requests == []
    assert (await session.send("Go")).turn == 1


@pytest.mark.parametrize("after_chunks", [0, 1, 3, 99])
async def test_a_broken_stream_keeps_its_partial_text(client, server, after_chunks):
    """A break raises StreamInterrupted with what had come, is not retried, and the next send works."""
    session = client.session()
    server.drop(after_chunks=after_chunks)
    got = []
    with pytest.raises(  # noqa: PT012 - the loop is what is tested
        bidikv_sdk.StreamInterrupted, match="before its turn was complete"
    ) as caught:
        async with session.stream("one two three") as stream:
            async for text in stream.text_stream:
                got.append(text)  # noqa: PERF401 - an exception ends it
    assert caught.value.partial_text == "".join(got) == "".join(["one", " two", " three"][: max(after_chunks - 1, 0)])
    assert caught.value.request_id == server.requests[0].headers["x-request-id"]
    assert isinstance(caught.value.__cause__, bidikv_sdk.APIConnectionError)
    assert len(server.requests) == 1
    assert session.turn == 0
    assert (await session.send("again")).turn == 1


async def test_a_stream_that_ends_silently_is_interrupted(client, server):
    """A body that ends without the last chunk is no turn, even where it ended in order."""
    chunk = {"id": "x", "created": 0, "model": "m", "choices": [{"index": 0, "delta": {"content": "par"}}]}
    server.respond(200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
    async with client.session().stream("Go") as stream:
        with pytest.raises(bidikv_sdk.StreamInterrupted, match="closed the connection") as caught:
            await stream.final_turn()
        assert caught.value.partial_text == "par"
        with pytest.raises(bidikv_sdk.StreamInterrupted):
            await stream.final_turn()


async def test_a_complete_turn_survives_a_break_before_done(client, server):
    """When the chunk with `bidikv` has come, what happens to the connection does not matter."""
    other = client.session("other")
    turn = await other.send("x")
    chunk = {**turn.completion, "choices": []}
    server.respond(200, f"data: {json.dumps(chunk)}\n\ndata: garbage\n\n")
    async with client.session().stream("Go") as stream:
        assert (await stream.final_turn()).turn == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            '{"error": {"message": "boom", "code": "engine_unavailable", "type": "x", "param": null}}',
            "503 engine_una",
        ),
        ('{"error": {"message": "boom", "code": 400}}', "BadRequestError: 400 error"),
        ('{"error": "boom"}', "AttributeError"),
        ("garbage", "JSONDecodeError"),
        ('{"choices": [{}]}', "KeyError"),
        ('{"choices": [], "bidikv": {}}', r"InvalidResponse: .*protocol is missing"),
    ],
)
async def test_an_error_inside_a_stream_interrupts_it(client, server, data, message):
    """The server's error, or an event that cannot be read, is the cause of the interruption."""
    session = client.session()
    server.respond(200, f"data: {data}\n\ndata: [DONE]\n\n")
    async with session.stream("Go") as stream:
        with pytest.raises(bidikv_sdk.StreamInterrupted, match=message):
            await stream.final_turn()
    assert (await session.send("again")).turn == 1


async def test_opening_a_stream_retries_and_reopens_like_a_send(client, server):
    """Until the reply begins, a stream is a request like any other."""
    session = client.session()
    await session.send("one")
    server.forget()
    server.fail("engine_unavailable", retry_after_s=3.0, on="turns")
    async with session.stream("two") as stream:
        turn = await stream.final_turn()
    assert (turn.reopened, turn.turn) == (True, 2)
    assert server.clock.slept_s == [3.0]


async def test_a_refused_stream_leaves_the_session_usable(client, server):
    """An error on entering is raised there, and the next turn may begin."""
    session = client.session()
    server.fail("invalid_request")
    with pytest.raises(bidikv_sdk.BadRequestError):
        async with session.stream("Go"):
            pytest.fail("not reached")
    assert (await session.send("again")).turn == 1


async def test_the_body_s_exception_comes_out_of_a_stream(client, server):
    """An exception inside the block closes the stream and is not masked."""
    session = client.session()
    with pytest.raises(KeyError, match="the body"):
        async with session.stream("one two"):
            raise KeyError("the body")  # noqa: EM101
    assert server.info(session.id).turn == 0


async def test_a_repeated_streaming_turn_is_answered_from_the_stored_reply(client, server):
    """The retry of a turn whose stored reply comes as one chunk adds up to the same turn."""
    session = client.session()
    server.reply("hello", tool_calls=CALLS)
    await session.send("Go")
    key = server.requests[0].headers["idempotency-key"]
    body = {**server.requests[0].body, "stream": True}
    async with httpx.AsyncClient(transport=server.async_transport()) as http:
        headers = {"X-Session-ID": session.id, "Idempotency-Key": key}
        reply = await http.post(f"http://fake/v1/sessions/{session.id}/turns", json=body, headers=headers)
    total = ChunkSum()
    for event in EventDecoder().feed(reply.content):
        total.add(json.loads(event))
    assert total.completion()["choices"][0]["message"]["tool_calls"] == CALLS
    assert total.text == "hello"
